"""What the processes in front of one engine know of each other."""

import mmap
import time

ROOM = 1 << 16
"""Bytes for the counts of one process, far more than there are."""


class Siblings:
    """Made before the processes are forked, each of which then takes its index; or there is one.

    All of them see what one writes here.
    """

    def __init__(self, count: int = 1) -> None:
        self.index = 0
        self.admitted = memoryview(mmap.mmap(-1, 8 * count)).cast("q")
        """Sequences that wait or run by way of each process."""
        self.counts = [memoryview(mmap.mmap(-1, ROOM)).cast("d") for _ in range(count)]
        """Of each process numbers that grow, in an order of their own, and zeros."""
        self.audited = memoryview(mmap.mmap(-1, ROOM)).cast("d")
        """When the last audit of each engine ended, by way of any process; 0: none has."""
        self.began = time.monotonic()
