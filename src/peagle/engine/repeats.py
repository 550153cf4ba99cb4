"""How often a step repeats its cycle: as often as the device would else wait for the host."""

import math

from peagle.engine.step import CycleTime

MOST_REPEATS = 4
"""Cycles in a step. Answers come in pieces of so many tokens then, and whoever asks meanwhile waits
for so many cycles."""
MARGIN = 1.1
"""How many times as long as the host the device should be busy with a step."""
SMOOTHING = 1 / 16
"""Weight of the newest step in the moving averages."""


class Repeats:
    """Compares what host and device take for a step.

    A cycle of a small model without drafts is over before the host, which takes its time for each
    request, has planned the next one.
    """

    def __init__(self) -> None:
        self._host = self._device = 0.0
        """Seconds of the host for a step, and of the device for a cycle."""

    @property
    def wanted(self) -> int:
        """Cycles of the next step, where nothing is against it."""
        if not self._device:
            return 1
        return min(max(math.ceil(MARGIN * self._host / self._device), 1), MOST_REPEATS)

    def took(self, time: CycleTime) -> None:
        """Learn from a step."""
        if time.drafts or not time.host:
            return
        weight = SMOOTHING if self._device else 1.0
        host = min(time.host, MOST_REPEATS * time.seconds)
        self._host += (host - self._host) * weight
        self._device += (time.seconds - self._device) * weight
