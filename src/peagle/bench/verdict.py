"""What rounds of runs say: how many times as fast, which method is the fastest, and how sure."""

import itertools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from peagle.bench.case import Load
from peagle.bench.runs import Run

K = TypeVar("K")
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
class Ranking:
    """The fastest method, the one after it, and by how much."""

    first: Run
    second: Run
    lead: Ratio

    @property
    def clear(self) -> bool:
        """Whether the first is faster by more than chance and by enough to matter."""
        return self.lead.low > EQUAL

    def as_json(self) -> dict[str, Any]:
        """As an entry of the result file."""
        return {
            "first": self.first.case.method,
            "second": self.second.case.method,
            "clear": self.clear,
            "ratio": self.lead.median,
            "interval": (self.lead.low, self.lead.high) if self.lead.bounded else None,
        }


def judge(runs: Sequence[Run]) -> Ranking | None:
    """Compare the two fastest methods, each by its fastest case; None if fewer than two ran.

    runs: median runs under one load, with their rounds.
    """
    best = [same[0] for same in grouped(ranked(runs), lambda run: run.case.method).values()]
    pairs = itertools.permutations(best[:2])
    verdicts = [Ranking(*pair, compare(*pair)) for pair in pairs if len(pair) == 2]
    return max(verdicts, key=operator.attrgetter("clear"), default=None)


def ranked(runs: Sequence[Run]) -> list[Run]:
    """Median runs under one load, the fastest first: by the speed-ups that are told of them.

    Where there are none, or over different peers: by those over the first run.
    """
    common = None if runs[0].case.engine else reference(runs[0], runs)
    return sorted(runs, key=lambda run: compare(run, common or runs[0]).median, reverse=True)


def grouped(runs: Iterable[Run], key: Callable[[Run], K]) -> dict[K, list[Run]]:
    """Runs with the same key together, in their order."""
    found: dict[K, list[Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def by_load(runs: Iterable[Run]) -> dict[Load, list[Run]]:
    """Runs that may be compared with one another, in their order."""
    return grouped(runs, lambda run: run.case.load)


def compare(run: Run, other: Run) -> Ratio:
    """How many times as fast `run` is as `other`, round by round, as far as both went."""
    ratios = [fast / slow for fast, slow in zip(_turns(run), _turns(other), strict=False)]
    return Ratio(statistics.median(ratios), *interval(ratios))


def _turns(run: Run) -> tuple[float, ...]:
    """Its speed in each turn; engines take none, so that only their medians are compared."""
    return (run.measures.otps,) if run.case.engine else run.rounds


def reference(run: Run, runs: Sequence[Run]) -> Run | None:
    """What a run is compared with: no speculation under its load, or of servers the first.

    Where engines are compared: a peer's fastest setting with the same method and K.
    """
    same = [other for other in runs if other.case.load == run.case.load]
    if run.case.engine:
        peers = [other for other in same if other.case.is_peer and _drafts_alike(other, run)]
        return max(peers, key=lambda peer: peer.measures.otps, default=None)
    first = same[0] if same and run.case.is_server else None
    return next((other for other in same if other.case.undrafted), first)


def _drafts_alike(one: Run, other: Run) -> bool:
    return (one.case.method, one.case.k) == (other.case.method, other.case.k)


def speed_up(run: Run, runs: Sequence[Run]) -> Ratio | None:
    """Over its reference; None where that was not run."""
    other = reference(run, runs)
    return None if other is None else compare(run, other)


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


def bounded(rounds: int) -> bool:
    """Whether so many rounds are enough for an interval."""
    return interval(range(rounds))[1] < math.inf


def doubts(runs: Sequence[Run]) -> Iterator[str]:
    """Why median runs with their rounds should not be believed, a sentence each."""
    yield from filter(None, (_impossible(run, runs) for run in runs))
    shares = [run.core_share for run in runs if run.core_share is not None]
    if shares and (share := statistics.median(shares)) < IDLE:
        taken = f"{1 - share:.0%} of the time"
        yield f"the machine was busy: other programs had this one's core for {taken}"
    widest = max(map(spread, runs))
    if widest > STEADY:
        yield (
            f"the machine was unsteady: equal work took {widest:.1f} times as long in one quarter "
            "of the rounds as in another"
        )


def _impossible(run: Run, runs: Sequence[Run]) -> str | None:
    """What is wrong with a speed-up over no speculation above the tokens of its round's cycles."""
    other, measures = reference(run, runs), run.measures
    length = measures.tokens_per_cycle or measures.acceptance_length
    if other is None or other.case.is_server or other.case.is_peer or length is None:
        return None
    turn = run.rounds.index(measures.otps)
    if turn >= len(other.rounds):
        return None
    gain = measures.otps / other.rounds[turn]
    if gain <= EQUAL * length:
        return None
    what = run.case.label.replace(", ", " at ")
    return (
        f"a speed-up of {gain:.2f} cannot be: a cycle of {what} emits {length:.2f} tokens and "
        "takes longer than one token does without it"
    )


def spread(run: Run) -> float:
    """Upper quartile of a case's speeds over the lower one; one bad round does not move it."""
    if len(run.rounds) == 1:
        return 1.0
    low, _, high = statistics.quantiles(run.rounds, n=4, method="inclusive")
    return high / low
