"""How many drafts a cycle makes: the number that gives the most tokens per second."""

from collections.abc import Mapping

from peagle.engine.step import CycleTime

CANDIDATES = (1, 3, 6, 12, 24)
"""Few, since each is captured for every batch size at the start: the best of these is within a few
percent of the best of all."""
PRIOR_RATE, PRIOR_COUNT = 0.8, 32
"""Acceptance rate of the first draft before any was verified, and how many it counts as."""
MEMORY = 4096
"""Verifications after which an old one weighs 1/e of a new one."""
SMOOTHING = 1 / 32
"""Weight of the newest cycle in the moving average of the overhead."""
MIN_CYCLES = 16
"""Cycles between two changes: the first cycle after a change to fewer drafts is not captured."""
MIN_GAIN = 1.02
"""Speed-up that a change must promise."""

Seconds = Mapping[int, Mapping[int, float]]
"""Seconds of a cycle by number of requests, then of drafts."""


def candidate_lengths(k: int) -> tuple[int, ...]:
    """The lengths to choose from for a drafter of K tokens: K, and candidates up to 3/4 of it."""
    return (*(count for count in CANDIDATES if 4 * count <= 3 * k), k)


class DraftLength:
    """Weighs the time of cycles against the tokens that they are expected to give.

    Each draft position has its own acceptance rate, given that those before it were accepted. The
    rate of a position that no cycle has tried for long drifts to that of the one before it, so that
    it is tried again. Times are measured at the start; what contexts and sampling add to them is
    measured while running, and assumed equal for all lengths.
    """

    def __init__(self, seconds: Seconds) -> None:
        """seconds: measured with greedy requests and empty contexts."""
        self._seconds = {size: dict(costs) for size, costs in sorted(seconds.items())}
        self._chosen = max(max(costs) for costs in self._seconds.values())
        self._cycles = MIN_CYCLES
        """Cycles since the last change."""
        self._accepted, self._tried = ([0.0] * self._chosen for _ in range(2))
        self._overhead = 0.0

    def choose(self, requests: int) -> int:
        """Drafts of the next cycle, which has `requests` requests. Changes nothing."""
        costs, tokens = self._costs(requests), self._tokens()
        speeds = {drafts: tokens[drafts] / (costs[drafts] + self._overhead) for drafts in costs}
        best = max(speeds, key=lambda drafts: speeds[drafts])
        gains = speeds[best] > MIN_GAIN * speeds[self._chosen]
        return best if gains and self._cycles >= MIN_CYCLES else self._chosen

    def launched(self, drafts: int) -> None:
        """Note a cycle with drafts as they were chosen."""
        self._cycles = self._cycles + 1 if drafts == self._chosen else 0
        self._chosen = drafts

    def verified(self, drafts: int, accepted: int) -> None:
        """Learn from one request's verification."""
        keep = 1 - 1 / MEMORY
        self._accepted = [keep * count for count in self._accepted]
        self._tried = [keep * count for count in self._tried]
        for place in range(min(accepted + 1, drafts)):
            self._tried[place] += 1
            self._accepted[place] += place < accepted

    def took(self, time: CycleTime) -> None:
        """Learn from the time of a captured cycle."""
        found = max(time.seconds - self._costs(time.requests)[time.drafts], 0.0)
        self._overhead += (found - self._overhead) * SMOOTHING

    def _costs(self, requests: int) -> dict[int, float]:
        """Seconds by number of drafts, as measured at the start."""
        size = next((size for size in self._seconds if size >= requests), max(self._seconds))
        return self._seconds[size]

    def _tokens(self) -> list[float]:
        """Expected tokens per request and cycle with 0, 1, 2 ... drafts."""
        tokens, rate, reached = [1.0], PRIOR_RATE, 1.0
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            rate = (accepted + PRIOR_COUNT * rate) / (tried + PRIOR_COUNT)
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens
