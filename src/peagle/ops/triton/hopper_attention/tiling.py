"""What the attention kernel is compiled for, and how its tiles are spread over threads."""

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from peagle.ops.triton.gluon import digest

TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Layout of all operands in shared memory."""
NARROW_TILE = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
"""The layout of operands whose lines have 64 bytes."""
LEFT_LINES = 64
"""Lines of a left operand that four warps multiply together."""
LEAST_KEYS = 256
"""Fewest keys in a part of a context, of heads up to 128 wide."""
WIDE, WIDE_LINES = 256, 32
"""The size of the widest heads, and the most lines of theirs that registers have room for."""


@dataclass(frozen=True)
class Tiling:
    """The sizes and switches that the kernel is compiled for."""

    heads: int
    kv_heads: int
    size: int
    """The size of a head."""
    padded: int
    """Heads that share keys, padded to a power of two."""
    lines: int
    """Rows of a request times `padded`."""
    together: int
    """Programs that share a multiprocessor: one large, two small, or three or four with less."""
    norm: bool
    window: bool
    sinks: bool
    tree: bool
    """Whether a request's rows are a tree's, which see their ancestors alone."""
    settled: bool
    causal: bool = True
    """Whether a row sees no key behind its own."""
    narrow: bool = False
    """Whether the cache keeps E4M3, two in 16 bits."""
    scaled: bool = False
    """Whether the cache keeps its numbers in other units than 1."""
    v_norm: bool = False
    """Whether values are normed."""
    source: str = digest(__file__)

    @property
    def group(self) -> int:
        """Heads that share keys."""
        return self.heads // self.kv_heads

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 8 if self.together == 1 else 4

    @property
    def crowded(self) -> bool:
        """Whether the ring is short of memory, which keys and values of 8 bits need half of."""
        return (self.together == 4 or self.size == WIDE) and not self.narrow

    @property
    def by_rows(self) -> bool:
        """Whether a request's lines are the left operand of products; else keys are."""
        return self.lines == LEFT_LINES and self.together > 1 and not self.narrow

    @property
    def places(self) -> int:
        """Places of the ring, each for a tile's keys or values."""
        # of heads of 128 a small program's six places of 64 keys are 96 KB: two have room in 227
        # KB; a large one's, of 128 keys, are 192 KB; four programs have 48 KB of them each at most,
        # which are six places of 8 bits; heads of 256 need twice as much
        return 6 if not self.crowded else 4 if self.by_rows else 3

    @property
    def ahead(self) -> int:
        """Places that are filled ahead: all but one where they are few, else all but two."""
        return self.places - (1 if self.crowded else 2)

    @property
    def registers(self) -> int | None:
        """Most registers of a thread, so that all programs fit; None: the compiler's choice."""
        # a multiprocessor has 65,536 registers: 128 for each of 4 x 128 threads
        return {3: 168, 4: 128}.get(self.together)

    @property
    def stored(self) -> int:
        """Elements of 16 bits that the cache has for a head."""
        return self.size // 2 if self.narrow else self.size

    @property
    def parts_at_once(self) -> int:
        """Parts of a context that are loaded together when they are merged."""
        return 2 if self.crowded else 4

    @property
    def lines_at_once(self) -> int:
        """Lines that are normed and rotated together: twice as many do not fit into registers."""
        return min(self.lines, 16 if self.crowded else 32)

    @property
    def own(self) -> int:
        """Rows of a request, at least the 8 that a tile in shared memory is cut at."""
        return max(self.lines // self.padded, 8)

    @property
    def width(self) -> int:
        """Columns of the q, k, v product."""
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def keys(self) -> int:
        """Keys of a tile: 16 for each warp, the fewest for a left operand; half of that where rows
        are the left operand and memory is short."""
        return 32 if self.crowded and self.by_rows else 16 * self.warps

    @property
    def least_share(self) -> int:
        """Fewest tiles in a part."""
        return LEAST_KEYS // (2 if self.size == WIDE else 1) // self.keys

    @property
    def partial(self) -> int:
        """Numbers that a part leaves: [lines, size] weighted values, then [2, lines] of highest
        scores and sums of weights."""
        return self.lines * (self.size + 2)

    @property
    def rows(self) -> gl.BlockedLayout:
        """Layout of [rows, size]: 16 bytes a thread."""
        return self._halves(self.size)

    @property
    def fetched(self) -> gl.BlockedLayout:
        """Layout of [keys, stored]: 16 bytes a thread."""
        return self._halves(self.stored)

    def _halves(self, columns: int) -> gl.BlockedLayout:
        across = columns // 8
        return gl.BlockedLayout([1, 8], [32 // across, across], [self.warps, 1], [1, 0])

    @property
    def ring(self) -> gl.NVMMASharedLayout:
        """Layout of [keys, stored] in the ring."""
        return TILE if self.stored >= 64 else NARROW_TILE

    @property
    def sums(self) -> gl.BlockedLayout:
        """Layout of [rows, size] in float32: 16 bytes a thread."""
        across = min(self.size // 4, 32)
        return gl.BlockedLayout([1, 4], [32 // across, across], [self.warps, 1], [1, 0])

    @property
    def scores(self) -> gl.NVMMADistributedLayout:
        """Layout of scores [lines, keys] by rows, else of [keys, lines] and [size, lines]."""
        return self._product(self.keys if self.by_rows else self.lines)

    @property
    def left(self) -> gl.DotOperandLayout:
        """Layout of keys and values of 8 bits as left operands, and of their codes."""
        return gl.DotOperandLayout(0, self.scores, 2)

    @property
    def drawn(self) -> gl.NVMMADistributedLayout:
        """Layout of weighted values by rows: [lines, size]."""
        return self._product(self.size)

    def _product(self, columns: int) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [self.warps, 1], [16, columns, 16])
