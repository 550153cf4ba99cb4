"""The engine's process: `python -m peagle.engine_client.child DESCRIPTOR...`, as `EngineProcess`
does.

The first DESCRIPTOR is that of its end of the socket pair. It ends when the other end is closed, be
it by the death of the process there; signals that are meant for both it ignores. Further ones are
those of pairs with fronts.
"""

import faulthandler
import signal
import sys


def main() -> int:
    """Load and run the engine; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # where is it? as in the one in front
    from peagle.engine_client.loop import serve  # seconds, in which signals may come

    return serve([int(word) for word in sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
