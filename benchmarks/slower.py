"""`peagle serve` whose engine's steps take longer by a share: `slower.py SHARE [FLAG ...]`."""

import sys
import time
from typing import Any

from peagle.__main__ import main
from peagle.engine.engine import Engine


def slow_down(share: float) -> None:
    """From now on every step of an engine is followed by a sleep of so much of its time."""
    plain = Engine.step

    def step(self: Engine) -> Any:
        begin = time.perf_counter()
        done = plain(self)
        time.sleep(share * (time.perf_counter() - begin))
        return done

    if share:
        Engine.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(float(sys.argv[1]))
    sys.argv[1] = "serve"
    sys.exit(main())
