"""How the four products of a chain, its links, are divided into work for programs."""

import math
from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from peagle.ops.triton.gluon import digest
from peagle.ops.triton.tiles import padded

PANEL = gl.constexpr(64)
"""Columns of a panel: 128 bytes of a weight's line."""
HEIGHT = gl.constexpr(64)
"""Lines for which a panel has room: as many as a product's left operand takes."""
OWNED = gl.constexpr(32)
"""Outputs that a program adds to the stream at a time."""
LAYOUT, LAYOUT3, LAYOUT4 = (gl.NVMMASharedLayout(128, 16, rank=rank) for rank in (2, 3, 4))
"""Layouts of one or several panels in shared memory."""
LEAST_ROWS, MOST_ROWS = 8, 64


@dataclass(frozen=True)
class Link:
    """One of the four products.

    A panel has a line for each output of a tile, or two: its gate and what that gates ("gated"), or
    one piece of the depth and the next ("folded"). Where a tile is "halved", two programs share its
    depth.
    """

    # what the 64 lines of a panel are
    #
    #   plain    48 outputs, 16 lines unused       folded   32 outputs, a piece of the depth
    #   halved   64 outputs, half of the depth              the same 32, the next piece
    #   gated    32 gates
    #            32 outputs that they gate
    kind: str
    """"plain", "gated", "folded" or "halved"."""
    depth: int
    outputs: int
    columns: int
    """Outputs of a tile."""
    panels: int = 2
    """Panels in a slot, along the depth: memory is faster the longer its runs."""
    strips: int = 1
    """Strips of a tile, one below the other, each as high as a panel."""

    @property
    def lines(self) -> int:
        """Lines of a tile over all its strips."""
        return 2 * self.columns if self.kind in ("gated", "folded") else self.columns

    @property
    def pieces(self) -> int:
        """Pieces of the depth in one panel."""
        return 2 if self.kind == "folded" else 1

    @property
    def chunk(self) -> int:
        """Columns of the depth in one slot."""
        return self.panels * PANEL.value * self.pieces

    @property
    def programs(self) -> int:
        """Programs that share a tile."""
        return 2 if self.kind == "halved" else 1

    @property
    def steps(self) -> int:
        """Slots that a program fills for a tile."""
        return self.depth // (self.chunk * self.programs)

    @property
    def units(self) -> int:
        """Units of work, dealt to the programs in turn."""
        return -(-self.outputs // self.columns) * self.programs

    @property
    def inputs(self) -> int:
        """Pieces of input in a slot."""
        return self.panels * self.pieces

    @property
    def box(self) -> tuple[int, ...]:
        """What one copy of weights brings: columns in panels, gates and what they gate, lines."""
        if self.kind == "gated":
            return self.panels, 2, 32, PANEL.value
        if self.kind == "plain":
            return 1, 32, PANEL.value
        return self.inputs, HEIGHT.value // self.pieces, PANEL.value

    def bytes(self, rows: int) -> int:
        """Bytes that are loaded into a slot, weights and `rows` rows of input."""
        return int(self.panels * PANEL.value * 2 * (self.lines + rows * self.pieces))


@dataclass(frozen=True)
class ChainSizes:
    """The sizes that the kernel is compiled for."""

    rows: int
    """Rows of the pass, padded to 8, 16, 32 or 64."""
    hidden: int
    heads: int
    """Columns of attended values."""
    inner: int
    qkv: int
    """Outputs of the next layer's q, k, v product; 0 after the last layer."""
    programs: int
    stages: int = 0
    """Slots of the ring."""
    source: str = digest(__file__)

    @property
    def out_link(self) -> Link:
        """The output projection."""
        return self._added(self.heads)

    @property
    def gate_link(self) -> Link:
        """The projections gate and up."""
        narrow = Link("gated", self.hidden, self.inner, 32, 4 if self.alike else 2)
        # three strips share a copy of the input, unless some program got more lines by it
        wide = Link("gated", self.hidden, self.inner, 96, 2, strips=3)
        return wide if self.alike and self._longest(wide) <= self._longest(narrow) else narrow

    @property
    def down_link(self) -> Link:
        """The down projection."""
        return self._added(self.inner)

    @property
    def qkv_link(self) -> Link:
        """The next layer's q, k, v projection."""
        # tiles of 48, as of 32 below, are as many as fit one turn: an 8B model has 6,144 outputs of
        # q, k and v and a stream of 4,096, 128 tiles each for 132 multiprocessors
        return Link("plain", self.hidden, self.qkv, 48, 4 if self.alike else 2)

    @property
    def links(self) -> tuple[Link, Link, Link, Link]:
        """All four links, in their order."""
        return self.out_link, self.gate_link, self.down_link, self.qkv_link

    def _longest(self, link: Link) -> int:
        """Lines of the program that has most of them."""
        return -(-link.units // self.programs) * link.lines

    def _added(self, depth: int) -> Link:
        if self.alike:
            return Link("halved", depth, self.hidden, HEIGHT.value, 4)
        return Link("folded", depth, self.hidden, OWNED.value)

    @property
    def alike(self) -> bool:
        """Whether a panel has as many lines as there are rows, so that input takes panels' places.

        The input is then as large as the weights, so that tiles have more lines.
        """
        return self.rows == HEIGHT.value

    @property
    def panels(self) -> int:
        """Places in a slot for panels of weights, or of anything of that size."""
        return 8 if self.alike else 2

    @property
    def pieces(self) -> int:
        """Places in a slot for input, which is filled from its end."""
        return 8 if self.alike else 4

    @property
    def slot(self) -> int:
        """Bytes of a slot."""
        pieces = 0 if self.alike else self.pieces
        return PANEL.value * 2 * (self.panels * HEIGHT.value + pieces * self.rows)

    def boxes(self, link: Link) -> list[int]:
        """Shape of the ring as places for what one copy of a link's weights brings."""
        lines = self.stages * self.panels * HEIGHT.value
        return [lines // math.prod(link.box[:-1]), *link.box]

    @property
    def given(self) -> int:
        """Parts of tiles whose sums go from one program to another."""
        return self.out_link.units if self.alike else 0

    @property
    def squares_stride(self) -> int:
        """Distance of two parts of the sums of squares, as in `skinny_product`."""
        return padded(self.rows)
