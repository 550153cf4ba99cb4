"""What to use under a load, how sure that is, and what it costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.bench.case import Load
from peagle.bench.runs import Run
from peagle.bench.verdict import Ranking, Ratio, compare, ranked, reference

HOUR = 3600.0


@dataclass(frozen=True)
class Advice:
    """The fastest case under a load."""

    load: Load
    fastest: Run
    gain: Ratio | None
    """Over its reference; None where that was not run, or is the fastest itself."""
    others: tuple[Run, ...]
    """Cases that are not clearly slower, the fastest first."""
    reference: Run | None

    @property
    def clear(self) -> bool:
        """Whether it is clearly faster than its reference."""
        return self.gain is not None and self.reference not in self.others

    @property
    def choice(self) -> Run:
        """What to use: the fastest, unless rounds enough say that its reference may be as fast."""
        if self.reference is None or self.clear or (self.gain and not self.gain.bounded):
            return self.fastest
        return self.reference

    @property
    def compared(self) -> list[Run]:
        """The choice, its reference, and the fastest, each once."""
        wanted = [self.choice, self.reference, self.fastest]
        found = {id(run): run for run in wanted if run is not None}
        return list(found.values())


def advise(runs: Sequence[Run]) -> Advice:
    """What to use under the load of some median runs, at least one."""
    fastest, *slower = ranked(runs)
    equal = tuple(o for o in slower if not Ranking(fastest, o, compare(fastest, o)).clear)
    other = reference(fastest, runs)
    gain = None if other is None or other is fastest else compare(fastest, other)
    return Advice(fastest.case.load, fastest, gain, equal, other)


@dataclass(frozen=True)
class Price:
    """What the machine costs, and how much work there is."""

    per_hour: float | None = None
    """The price of the whole machine that was measured, in dollars."""
    target_rate: float | None = None
    """Output tokens per second that are needed."""

    def tokens_per_dollar(self, otps: float) -> float | None:
        """Output tokens for one dollar at full load."""
        return otps * HOUR / self.per_hour if self.per_hour else None

    def machines(self, otps: float) -> int | None:
        """As many of the measured machine as the target rate takes."""
        return math.ceil(self.target_rate / otps) if self.target_rate else None
