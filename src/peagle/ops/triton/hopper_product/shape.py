"""How a product is divided among programs, and what their threads have of it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from peagle.ops.triton.gluon import digest
from peagle.ops.triton.layer_chain import products
from peagle.ops.triton.product_call import ProductForm
from peagle.ops.triton.tiles import padded
from peagle.ops.triton.weights import Packing
from peagle.ops.weight import FP8, INT4, INT8, NVFP4, QuantizedWeight

GROUPS, LINES, STEP, PANEL, BOX = map(gl.constexpr, (3, 64, 128, 64, 32))
"""Groups of warps, the lines that each has, inputs of a step and of a panel of rows, and lines of
the weight in one copy. Squares are summed of as many outputs as a group has lines, too."""

FILES = *sorted(Path(__file__).parent.glob("*.py")), Path(products.__file__)
CODE = "".join(digest(str(file)) for file in FILES)
"""What the kernels' constants mean, layouts of the layer chain's among them."""


def covers(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether scales are of whole steps, or of E2M1's blocks of 16, and all can be copied."""
    wide, (lines, depth) = weight.block[1], weight.shape
    of_steps = weight.format in (FP8, INT4, INT8) and (wide % STEP.value == 0 or wide >= depth)
    of_steps &= weight.zeros is None or weight.format == INT4
    runs = (of_steps and weight.run == STEP.value) or weight.format == NVFP4
    # copies are of whole panels of rows, and lines of the weight begin at 16 bytes
    whole = depth % PANEL.value == 0 and weight.numbers.shape[-1] % 16 == 0
    return runs and whole and lines >= GROUPS.value * LINES.value and x.dtype == torch.bfloat16


@dataclass(frozen=True)
class TileShape(ABC):
    """What a kernel is compiled with."""

    packing: Packing
    form: ProductForm
    rows: int
    """Rows of a tile."""
    stages: int
    programs: int
    code: str = CODE
    """The digest of the kernel's files: a compiled kernel is of one meaning of these numbers."""
    groups: ClassVar[int]
    lines: ClassVar[int]
    """Lines of the weight that a group of warps has."""
    warps: ClassVar[int]
    """Warps of a group."""

    @property
    def columns(self) -> int:
        """Outputs of a group's tile; a gate and what it gates make one."""
        return self.lines // (1 + self.form.gated)

    @property
    def words(self) -> int:
        """Words of 16 bits of a line in a step."""
        return self.packing.step // self.packing.together

    @property
    def left(self) -> int:
        """Sums that a program leaves to others: of its first tile and of its last one."""
        return 2 * self.groups * self.lines * self.rows

    @property
    def held(self) -> int:
        """Rows of a part of the results' sums of squares."""
        return padded(self.rows)

    @property
    @abstractmethod
    def sums(self) -> gl.NVMMADistributedLayout:
        """How a group's threads have sums [lines, rows]."""

    @property
    def numbers(self) -> gl.DotOperandLayout:
        """How they have the weight's numbers; words of which each becomes two or four, too."""
        return gl.DotOperandLayout(0, self.sums, 2)


@dataclass(frozen=True)
class ProductShape(TileShape):
    """Of more rows than fill the smallest tile."""

    groups: ClassVar[int] = GROUPS.value
    lines: ClassVar[int] = LINES.value
    warps: ClassVar[int] = 4
    parts: ClassVar[int] = 16
    """Parts of sums of squares that are loaded at once."""
    gathered: ClassVar[int] = 1
    """Programs whose sums of a tile are loaded at once: registers have room for so many."""
    plain: ClassVar[gl.BlockedLayout] = products.PLAIN.value
    """How a group's threads have outputs by rows."""
    gated: ClassVar[gl.BlockedLayout] = products.GATED.value
    """How they have outputs by rows by gate and up."""

    @property
    def boxes(self) -> int:
        """Copies of the weight in a step."""
        return GROUPS.value * LINES.value // BOX.value

    @property
    def slot(self) -> int:
        """Bytes of a step."""
        return 2 * (GROUPS.value * LINES.value * self.words + STEP.value * self.rows)

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.rows, 16])

    @property
    def packed(self) -> gl.NVMMASharedLayout:
        """How words lie in shared memory."""
        return gl.NVMMASharedLayout(2 * self.words, 16, rank=2)


@dataclass(frozen=True)
class FewShape(TileShape):
    """Of rows that are no more than a tensor core's instruction takes."""

    groups: ClassVar[int] = 1
    lines: ClassVar[int] = 256
    warps: ClassVar[int] = 8
    parts: ClassVar[int] = 128
    copied: ClassVar[gl.BlockedLayout] = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    """Which words a thread copies, 16 bytes at a time: eight have those of a line."""
    copied_inputs: ClassVar[gl.BlockedLayout] = gl.BlockedLayout(
        [1, 8], [1, 32], [warps, 1], [1, 0]
    )
    """Which inputs a thread copies: a warp has those of a row."""
    packed: ClassVar[gl.SwizzledSharedLayout] = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    """How words, and inputs, lie in shared memory: eight lines' 16 bytes in all its banks."""
    plain: ClassVar[gl.BlockedLayout] = gl.BlockedLayout([2, 1], [32, 1], [1, warps], [0, 1])
    """Outputs by rows; a warp has a row, so that no other one has squares of it."""
    gated: ClassVar[gl.BlockedLayout] = gl.BlockedLayout(
        [2, 1, 2], [32, 1, 1], [1, warps, 1], [2, 0, 1]
    )
    """Outputs by rows by gate and up, both in one thread."""

    @property
    def inputs(self) -> gl.DotOperandLayout:
        """How threads have rows [inputs, rows]."""
        return gl.DotOperandLayout(1, self.sums, 2)

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        return gl.NVMMADistributedLayout([2, 0], [self.warps, 1], [16, 8])

    @property
    def runs(self) -> int:
        """Runs of a line in a step."""
        return self.packing.step // self.packing.run

    @property
    def gathered(self) -> int:
        """Programs whose sums of a tile are loaded at once: integers leave no registers."""
        return 1 if self.packing.kind == "int4" else 8 if self.form.gated or self.form.adds else 13

    @property
    def shared_columns(self) -> int:
        """Scales of a line; E2M1's as words of four, of a run each."""
        return self.packing.columns // (4 if self.packing.kind == "nvfp4" else 1)

    @property
    def shared(self) -> gl.SliceLayout | gl.DistributedLinearLayout:
        """How threads have what runs share, [lines, runs]: of the lines whose numbers they
        multiply. The four that have numbers of the same lines have a run's words of scales each."""
        if self.packing.kind == "nvfp4":
            return gl.SliceLayout(1, gl.SliceLayout(3, self.spread))
        lines, warps = [[8, 0], [128, 0]], [[16, 0], [32, 0], [64, 0]]
        lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
        shape = [self.lines, self.runs]
        return gl.DistributedLinearLayout([[0, 1], *lines], lanes, warps, [], shape)

    @property
    def spread(self) -> gl.DistributedLinearLayout:
        """How threads have words of a run of 64 inputs as operands, [lines, 2, 4, 2]."""
        words, lines = [[0, 0, 0, 1], [0, 1, 0, 0]], [[8, 0, 0, 0], [128, 0, 0, 0]]
        lanes = [[0, 0, 1, 0], [0, 0, 2, 0], *([line, 0, 0, 0] for line in (1, 2, 4))]
        warps = [[line, 0, 0, 0] for line in (16, 32, 64)]
        shape = [self.lines, 2, 4, 2]
        return gl.DistributedLinearLayout([*words, *lines], lanes, warps, [], shape)
