"""What attention's kernel is compiled for, and how its tiles lie in a program's threads."""

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from peagle.ops.triton.gluon import digest

TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Of all that is multiplied, in shared memory."""
LEFT_LINES = 64
"""Of a product's left operand, for each group of four warps."""
LEAST_KEYS = 256
"""Of a part of a context."""


@dataclass(frozen=True)
class Form:
    """Sizes and switches."""

    heads: int
    kv_heads: int
    size: int
    """Of a head."""
    padded: int
    """Heads that share keys, filled up to a power of two."""
    lines: int
    """Rows of a request times those."""
    together: int
    """Programs that share a multiprocessor: a large one, two small ones, or four that are given
    less memory."""
    norm: bool
    window: bool
    sinks: bool
    settled: bool
    source: str = digest(__file__)

    @property
    def group(self) -> int:
        """Heads that share keys."""
        return self.heads // self.kv_heads

    @property
    def warps(self) -> int:
        """Of a program."""
        return 8 if self.together == 1 else 4

    @property
    def crowded(self) -> bool:
        """Whether memory and registers are short."""
        return self.together == 4

    @property
    def by_rows(self) -> bool:
        """Whether a request's lines are the left operand of products; else keys are."""
        return self.lines == LEFT_LINES

    @property
    def places(self) -> int:
        """Of the ring, each for a tile's keys or its values: as leave room for other programs."""
        if self.crowded:
            return 4 if self.by_rows else 3
        return 6

    @property
    def ahead(self) -> int:
        """Places that are filled ahead. One is free at a time where few are, else a tile's two."""
        return self.places - (1 if self.crowded else 2)

    @property
    def registers(self) -> int | None:
        """Of a thread at most, where four programs are to have room; None: as it comes."""
        return 128 if self.crowded else None

    @property
    def parts_at_once(self) -> int:
        """Parts of a context whose loads are under way together when they are merged."""
        return 2 if self.crowded else 4

    @property
    def lines_at_once(self) -> int:
        """Lines that are normed and rotated together: twice as many have no room in registers."""
        return min(self.lines, 16 if self.crowded else 32)

    @property
    def own(self) -> int:
        """Rows of a request, at least as many as a tile in shared memory is cut at."""
        return max(self.lines // self.padded, 8)

    @property
    def width(self) -> int:
        """Of the product."""
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def keys(self) -> int:
        """Of one tile: 16 for each warp, the least as the left operand; half where that is rows
        and memory is short."""
        return 32 if self.crowded and self.by_rows else 16 * self.warps

    @property
    def least_share(self) -> int:
        """Tiles of a part at least."""
        return LEAST_KEYS // self.keys

    @property
    def partial(self) -> int:
        """Numbers that a part leaves: [lines, size] of what its keys gave, then [2, lines] of the
        highest score and the sum of shares."""
        return self.lines * (self.size + 2)

    @property
    def rows(self) -> gl.BlockedLayout:
        """Of [rows, size]: 16 bytes a thread."""
        across = self.size // 8
        return gl.BlockedLayout([1, 8], [32 // across, across], [self.warps, 1], [1, 0])

    @property
    def sums(self) -> gl.BlockedLayout:
        """The same in float32."""
        across = self.size // 4
        return gl.BlockedLayout([1, 4], [32 // across, across], [self.warps, 1], [1, 0])

    @property
    def scores(self) -> gl.NVMMADistributedLayout:
        """Of scores, [lines, keys] by rows; else of both products, [keys, lines], [size, lines]."""
        return self._product(self.keys if self.by_rows else self.lines)

    @property
    def drawn(self) -> gl.NVMMADistributedLayout:
        """By rows, of what they draw: [lines, size]."""
        return self._product(self.size)

    def _product(self, columns: int) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [self.warps, 1], [16, columns, 16])
