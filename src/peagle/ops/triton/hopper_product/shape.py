"""How a product is divided among programs, and what their threads have of it."""

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from peagle.ops.triton.product_call import ProductForm
from peagle.ops.triton.weights import Packing

GROUPS, LINES, STEP, PANEL, BOX = map(gl.constexpr, (3, 64, 128, 64, 32))
"""Groups of warps, the lines that each has, inputs of a step and of a panel of rows, and lines of
the weight in one copy."""


@dataclass(frozen=True)
class ProductShape:
    """What the kernel is compiled with."""

    packing: Packing
    form: ProductForm
    rows: int
    """Rows of a tile."""
    scales: int
    """Bytes of a line's scales; 0 where they are few, or are not whole 16."""
    stages: int
    programs: int
    code: str
    """The digest of the kernel's files: a compiled kernel is of one meaning of these numbers."""

    @property
    def columns(self) -> int:
        """Outputs of a group's tile; a gate and what it gates make one."""
        return LINES.value // (1 + self.form.gated)

    @property
    def words(self) -> int:
        """Words of 16 bits of a line in a step."""
        return STEP.value // self.packing.together

    @property
    def boxes(self) -> int:
        """Copies of the weight in a step."""
        return GROUPS.value * LINES.value // BOX.value

    @property
    def slot(self) -> int:
        """Bytes of a step."""
        return 2 * (GROUPS.value * LINES.value * self.words + STEP.value * self.rows)

    @property
    def left(self) -> int:
        """Sums that a program leaves to others: of its first tile and of its last one."""
        return 2 * GROUPS.value * LINES.value * self.rows

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        """How a group's threads have sums [lines, rows]."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.rows, 16])

    @property
    def numbers(self) -> gl.DotOperandLayout:
        """How they have the weight's numbers; words of which each becomes two or four, too."""
        return gl.DotOperandLayout(0, self.sums, 2)

    @property
    def packed(self) -> gl.NVMMASharedLayout:
        """How words lie in shared memory."""
        return gl.NVMMASharedLayout(2 * self.words, 16, rank=2)
