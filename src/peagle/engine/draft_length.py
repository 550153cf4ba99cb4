"""How many drafts a cycle makes: as many as bring the most tokens a second."""

from collections.abc import Mapping

CANDIDATES = (1, 3, 6, 12, 24)
"""Few, since each is captured for every batch size at the start: with the best of these a cycle is
within some percent of the best of all."""
RATE, WEIGHT = 0.8, 32
"""The share of drafts that is taken to be accepted before any was verified, and as if how many."""
REMEMBERED = 1024
"""Verifications, or cycles, after which one counts a third as much as a new one."""
HELD = 16
"""Cycles between two changes, each of which costs a cycle that is not captured."""
GAIN = 1.02
"""What a change must promise."""

Seconds = Mapping[int, Mapping[int, float]]
"""Of a cycle by its number of requests, and then of drafts."""


def draft_lengths(k: int) -> tuple[int, ...]:
    """What may be chosen where at most K tokens are drafted: K last, and none just below it."""
    return (*(count for count in CANDIDATES if 4 * count <= 3 * k), k)


class DraftLength:
    """Weighs what cycles cost against the drafts that they would bring.

    A draft is taken to be accepted with one probability wherever it stands: that can be learnt
    from cycles of any length. Costs are measured at the start; what contexts add to them is the
    same for all lengths and measured in passing.
    """

    def __init__(self, seconds: Seconds) -> None:
        """seconds: measured on requests without a context."""
        self._seconds = {size: dict(costs) for size, costs in sorted(seconds.items())}
        self._chosen = max(max(costs) for costs in self._seconds.values())
        self._cycles = HELD
        """Since the last change."""
        self._accepted, self._tried = RATE * WEIGHT, float(WEIGHT)
        self._context = 0.0

    def choose(self, requests: int) -> int:
        """Drafts of the next cycle, given how many requests it has."""
        self._cycles += 1
        costs = self._costs(requests)
        best = max(costs, key=lambda drafts: self._speed(drafts, costs))
        gain = self._speed(best, costs) / self._speed(self._chosen, costs)
        if gain > GAIN and self._cycles > HELD:
            self._chosen, self._cycles = best, 0
        return self._chosen

    def verified(self, drafts: int, accepted: int) -> None:
        """Learn from one request's drafts."""
        if drafts:
            keep = 1 - 1 / REMEMBERED
            self._accepted = keep * self._accepted + accepted
            self._tried = keep * self._tried + min(accepted + 1, drafts)

    def took(self, requests: int, drafts: int, seconds: float) -> None:
        """Learn from what a cycle took."""
        found = max(seconds - self._costs(requests)[drafts], 0.0)
        self._context += (found - self._context) * WEIGHT / REMEMBERED

    def _costs(self, requests: int) -> dict[int, float]:
        sizes = [size for size in self._seconds if size >= requests]
        return self._seconds[sizes[0] if sizes else max(self._seconds)]

    def _speed(self, drafts: int, costs: Mapping[int, float]) -> float:
        """Tokens a second of a request."""
        rate = self._accepted / self._tried
        tokens = sum(rate**place for place in range(drafts + 1))
        return tokens / (costs[drafts] + self._context)
