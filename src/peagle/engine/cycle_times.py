"""How long a cycle takes, by its number of requests and of drafts."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from peagle.engine.step import CycleTime

SMOOTHING = 1 / 32
"""Weight of the newest cycle in the moving average of the overhead."""
KEPT = 7
"""Latest times of a kind of cycle of which the least counts: other programs only add to them."""
LOOKS = 3
"""Cycles of each length at the start, to be timed; as many of none and most make a load known."""
LOOK_EVERY = 64
"""One in so many of all later cycles has the next length, to be timed again."""

Seconds = Mapping[int, Mapping[int, float]]
"""Seconds of a cycle by number of requests, then of drafts."""


class MeasuredTimes:
    """Times that were measured at the start, with greedy requests and empty contexts.

    What contexts and sampling add to them is measured while running, and assumed equal for all
    lengths.
    """

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = {size: dict(costs) for size, costs in sorted(seconds.items())}
        self._overhead = 0.0

    def seconds(self, requests: int) -> dict[int, float]:
        """Seconds by number of drafts."""
        costs = self._measured(requests)
        return {drafts: seconds + self._overhead for drafts, seconds in costs.items()}

    def took(self, time: CycleTime) -> None:
        """Learn from a cycle."""
        found = max(time.seconds - self._measured(time.requests)[time.drafts], 0.0)
        self._overhead += (found - self._overhead) * SMOOTHING

    def look(self, cycle: int) -> int | None:
        """How many drafts a cycle should have so that its time is learned; None: any number."""
        return None

    def _measured(self, requests: int) -> dict[int, float]:
        size = next((size for size in self._seconds if size >= requests), max(self._seconds))
        return self._seconds[size]


class RunningTimes:
    """Times of the cycles that ran, where nothing was measured before.

    They are those of the nearest number of requests that ran both without drafts and with most; a
    length that did not run there is taken to lie on the line between those that did.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """lengths: that a cycle may have, ascending, from 0 on."""
        self._lengths = lengths
        self._times: dict[int, dict[int, deque[float]]] = {}
        """The latest, by number of requests, then of drafts."""

    def seconds(self, requests: int) -> dict[int, float]:
        """As `MeasuredTimes`; empty while too little is known."""
        ends = {self._lengths[0], self._lengths[-1]}
        known = [
            size
            for size, times in self._times.items()
            if all(len(times.get(drafts, ())) >= LOOKS for drafts in ends)
        ]
        if not known:
            return {}
        nearest = self._times[min(known, key=lambda size: abs(size - requests))]
        ran = {drafts: min(times) for drafts, times in sorted(nearest.items())}
        between = np.interp(self._lengths, list(ran), list(ran.values()))
        return dict(zip(self._lengths, between.tolist(), strict=True))

    def took(self, time: CycleTime) -> None:
        """As `MeasuredTimes`."""
        if time.drafts in self._lengths:  # a request's own K, or the context's end, may be others
            times = self._times.setdefault(time.requests, {})
            times.setdefault(time.drafts, deque(maxlen=KEPT)).append(time.seconds)

    def look(self, cycle: int) -> int | None:
        """As `MeasuredTimes`, of a cycle counted from 0."""
        turn, rest = (cycle, 0) if cycle < LOOKS * len(self._lengths) else divmod(cycle, LOOK_EVERY)
        return None if rest else self._lengths[turn % len(self._lengths)]


CycleTimes = MeasuredTimes | RunningTimes
"""What cycles cost."""
