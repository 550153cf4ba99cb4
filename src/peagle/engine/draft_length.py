"""How many drafts a cycle makes: as many as bring the most tokens a second."""

from collections.abc import Mapping

CANDIDATES = (1, 3, 6, 12, 24)
"""Few, since each is captured for every batch size at the start: with the best of these a cycle is
within some percent of the best of all."""
RATE, WEIGHT = 0.8, 32
"""The share of first drafts that is taken to be accepted before any was verified, and how many
verifications that counts as."""
REMEMBERED = 4096
"""Verifications after which one counts a third as much as a new one."""
NEWEST = 1 / 32
"""What the newest cycle counts in what is added to the costs."""
HELD = 16
"""Cycles between two changes: a shorter cycle's first one is not captured."""
GAIN = 1.02
"""What a change must promise."""

Seconds = Mapping[int, Mapping[int, float]]
"""Of a cycle by its number of requests, and then of drafts."""


def draft_lengths(k: int) -> tuple[int, ...]:
    """What may be chosen where at most K tokens are drafted: K last, none above three quarters."""
    return (*(count for count in CANDIDATES if 4 * count <= 3 * k), k)


class DraftLength:
    """Weighs what cycles cost against the tokens that they would bring.

    Each draft has its own chance to be accepted once those before it were. Places that no cycle has
    tried for long are slowly taken to be like the one before them, so that they are tried again.
    Costs are measured at the start; what contexts and sampling add is taken to be the same for all
    lengths, and measured in passing.
    """

    def __init__(self, seconds: Seconds) -> None:
        """seconds: of greedy requests without a context."""
        self._seconds = {size: dict(costs) for size, costs in sorted(seconds.items())}
        self._chosen = max(max(costs) for costs in self._seconds.values())
        self._cycles = HELD
        """Since the last change."""
        self._accepted, self._tried = ([0.0] * self._chosen for _ in range(2))
        self._added = 0.0

    def choose(self, requests: int) -> int:
        """Drafts of the next cycle, given how many requests it has."""
        self._cycles += 1
        costs, tokens = self._costs(requests), self._tokens()
        speeds = {drafts: tokens[drafts] / (costs[drafts] + self._added) for drafts in costs}
        best = max(speeds, key=lambda drafts: speeds[drafts])
        if speeds[best] > GAIN * speeds[self._chosen] and self._cycles > HELD:
            self._chosen, self._cycles = best, 0
        return self._chosen

    def verified(self, drafts: int, accepted: int) -> None:
        """Learn from one request's drafts."""
        keep = 1 - 1 / REMEMBERED
        self._accepted = [keep * count for count in self._accepted]
        self._tried = [keep * count for count in self._tried]
        for place in range(min(accepted + 1, drafts)):
            self._tried[place] += 1
            self._accepted[place] += place < accepted

    def took(self, requests: int, drafts: int, seconds: float) -> None:
        """Learn from what a captured cycle took."""
        found = max(seconds - self._costs(requests)[drafts], 0.0)
        self._added += (found - self._added) * NEWEST

    def _costs(self, requests: int) -> dict[int, float]:
        """Seconds by number of drafts, as measured at the start."""
        size = next((size for size in self._seconds if size >= requests), max(self._seconds))
        return self._seconds[size]

    def _tokens(self) -> list[float]:
        """What a request gets of a cycle with 0, 1, 2 ... drafts."""
        tokens, rate, reached = [1.0], RATE, 1.0
        for accepted, tried in zip(self._accepted, self._tried, strict=True):
            rate = (accepted + WEIGHT * rate) / (tried + WEIGHT)
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens
