"""How the four products of a chain, its links, are cut into what one program takes."""

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from peagle.ops.triton.tiles import padded

PANEL = gl.constexpr(64)
"""Columns of a weight that one copy brings: 128 bytes a row."""
HEIGHT = gl.constexpr(64)
"""Lines that a panel has room for."""
PANELS = gl.constexpr(2)
"""In a slot of the ring."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Of panels in shared memory."""
LEAST_ROWS, MOST_ROWS = 8, 32


@dataclass(frozen=True)
class Link:
    """One of the four products.

    A panel has a line for each output of a tile; or two, of its gate and of what that gates, or of
    one piece of the depth and the next.
    """

    kind: str
    """"plain", "gated" or "folded"."""
    depth: int
    outputs: int
    columns: int
    """Outputs of a tile."""

    @property
    def lines(self) -> int:
        """Of a panel."""
        return self.columns if self.kind == "plain" else 2 * self.columns

    @property
    def pieces(self) -> int:
        """Of the depth in one panel."""
        return 2 if self.kind == "folded" else 1

    @property
    def chunk(self) -> int:
        """Of the depth in one slot."""
        return PANELS.value * PANEL.value * self.pieces

    @property
    def steps(self) -> int:
        """Slots that a tile fills."""
        return self.depth // self.chunk

    @property
    def tiles(self) -> int:
        """One after another, and from program to program."""
        return -(-self.outputs // self.columns)

    def bytes(self, rows: int) -> int:
        """That come into a slot, with so many rows of input."""
        return int(PANELS.value * PANEL.value * 2 * (self.lines + rows * self.pieces))


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for."""

    rows: int
    """8, 16 or 32."""
    hidden: int
    heads: int
    """Columns of attended values."""
    inner: int
    qkv: int
    """Of the next layer; 0 behind the last."""
    programs: int
    stages: int = 0
    """Slots of the ring."""

    @property
    def out_link(self) -> Link:
        """Of attended values."""
        return Link("folded", self.heads, self.hidden, 32)

    @property
    def gate_link(self) -> Link:
        """And up's."""
        return Link("gated", self.hidden, self.inner, 32)

    @property
    def down_link(self) -> Link:
        """The MLP's second."""
        return Link("folded", self.inner, self.hidden, 32)

    @property
    def qkv_link(self) -> Link:
        """The next layer's first."""
        return Link("plain", self.hidden, self.qkv, 48)

    @property
    def links(self) -> tuple[Link, Link, Link, Link]:
        """In their order."""
        return self.out_link, self.gate_link, self.down_link, self.qkv_link

    @property
    def slot(self) -> int:
        """Bytes."""
        return PANELS.value * PANEL.value * 2 * (HEIGHT.value + 2 * self.rows)

    @property
    def squares_stride(self) -> int:
        """From one part of the squares to the next, as `residual` has them."""
        return padded(self.rows)
