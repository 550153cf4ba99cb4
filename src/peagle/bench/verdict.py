"""What rounds of runs say: how many times as fast, which method is the fastest, and how sure."""

import itertools
import math
import operator
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peagle.bench.load import Run
from peagle.bench.pair import NAMES

CONFIDENCE = 0.95
EQUAL = 1.02
"""Up to this ratio two methods count as equally fast: so much depends on where memory lies."""
IDLE = 0.9
"""On an idle machine a thread has its core for at least this share of the time."""
STEADY = 1.25
"""On an idle machine a case's upper quartile of speeds is less than this many times the lower."""


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one case is as another: the median over rounds, and its interval."""

    median: float
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        """Whether there were enough rounds for an interval."""
        return self.high < math.inf


@dataclass(frozen=True)
class Verdict:
    """The fastest method, the one after it, and by how much."""

    first: Run
    second: Run
    lead: Ratio

    @property
    def clear(self) -> bool:
        """Whether the first is faster by more than chance and by enough to matter."""
        return self.lead.low > EQUAL


def judge(runs: Sequence[Run]) -> Verdict:
    """Compare the two fastest of at least two methods, each by its fastest case.

    runs: median runs at the same concurrency, with their rounds.
    """
    ranked = sorted(zip(_relative_speeds(runs), runs, strict=True), key=lambda one: -one[0])
    best: dict[str, Run] = {}
    for _, run in ranked:
        best.setdefault(run.case.method, run)
    pairs = itertools.permutations(list(best.values())[:2])
    verdicts = [Verdict(first, second, compare(first, second)) for first, second in pairs]
    return max(verdicts, key=lambda verdict: verdict.lead.median)


def compare(run: Run, other: Run) -> Ratio:
    """How many times as fast `run` is as `other`, round by round."""
    ratios = [fast / slow for fast, slow in zip(run.rounds, other.rounds, strict=True)]
    return Ratio(statistics.median(ratios), *interval(ratios))


def speed_up(run: Run, runs: Sequence[Run]) -> Ratio | None:
    """Against no speculation at the same concurrency; None where that was not run."""
    for other in runs:
        if other.case.method == "none" and other.case.concurrency == run.case.concurrency:
            return compare(run, other)
    return None


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of such values lies, with `CONFIDENCE`; 0 and infinity below six values.

    It is between two of the ordered values, by the sign test: that the true median is beyond the
    c-th value from one end has the chance that at most c - 1 tosses of a coin are heads. So it
    assumes nothing about the noise, and the worst rounds do not widen it.
    """
    ordered, count = sorted(values), len(values)
    found = (0.0, math.inf)
    beyond = 0.0
    for place in range((count + 1) // 2):
        beyond += 2 * math.comb(count, place) / 2**count
        if beyond > 1 - CONFIDENCE:
            break
        found = ordered[place], ordered[-1 - place]
    return found


def doubts(runs: Sequence[Run]) -> Iterator[str]:
    """Why median runs with their rounds should not be believed, a sentence each."""
    for run in runs:
        ratio, length = speed_up(run, runs), run.measures.acceptance_length
        if ratio is not None and ratio.median > EQUAL * length:
            yield (
                f"a speed-up of {ratio.median:.2f} cannot be: a cycle of "
                f"{NAMES[run.case.method]} at K = {run.case.k} emits {length:.2f} tokens and takes "
                "longer than one token does without it"
            )
    shares = [run.core_share for run in runs if run.core_share is not None]
    if shares and (share := statistics.median(shares)) < IDLE:
        yield (
            f"the machine was busy: other programs had this one's core for {1 - share:.0%} of the "
            "time"
        )
    widest = max(map(_spread, runs))
    if widest > STEADY:
        yield (
            f"the machine was unsteady: equal work took {widest:.1f} times as long in one quarter "
            "of the rounds as in another"
        )


def _relative_speeds(runs: Sequence[Run]) -> list[float]:
    """Each case's median over rounds of its speed, as a multiple of the round's mean speed."""
    means = [statistics.fmean(speeds) for speeds in zip(*(run.rounds for run in runs), strict=True)]
    return [statistics.median(map(operator.truediv, run.rounds, means)) for run in runs]


def _spread(run: Run) -> float:
    """Upper quartile of a case's speeds over the lower one; one bad round does not move it."""
    if len(run.rounds) == 1:
        return 1.0
    low, _, high = statistics.quantiles(run.rounds, n=4, method="inclusive")
    return high / low
