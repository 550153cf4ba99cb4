"""What launches of products have in common, whatever the weight's format."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.products.product import Epilogue
from peagle.ops.triton.launch import counters
from peagle.ops.weight import Weight


class Addition(NamedTuple):
    """The stream that a product is added to, and where the results are written."""

    stream: Tensor
    """[rows, outputs]"""
    norm: Tensor
    """[outputs] the next norm's weight"""
    scaled: Tensor
    """[rows, outputs] the sum times `norm`"""
    squares: Tensor
    """[tiles, rows] the sum's squares, of each tile of outputs"""


class ProductResults(NamedTuple):
    """What is added, what is written, and where programs meet; anything in place of what is not."""

    stream: Tensor
    norm: Tensor
    out: Tensor
    scaled: Tensor
    squares: Tensor
    partial: Tensor
    arrivals: Tensor


class ProductSizes(NamedTuple):
    """Sizes of a product, and what is added to a mean of squares."""

    outputs: int
    depth: int
    parts: int
    """Parts of the inputs' sums of squares."""
    held: int
    """Rows of such a part."""
    eps: float


@dataclass(frozen=True)
class ProductForm:
    """What a kernel is compiled with, besides its tile."""

    splits: int
    """Parts of the depth, for as many programs that share a tile."""
    parts: int
    """Lanes for the parts of the sum of squares."""
    gated: bool
    gelu: bool
    """Whether the gate is GELU's, not SiLU's."""
    adds: bool
    apart: bool = False
    """Whether a program has all parts of the depth, one after the other."""


@dataclass(frozen=True)
class ProductCall:
    """A product, and what is fused with it."""

    x: Tensor
    """[rows, depth]"""
    squares: Tensor | None
    """[parts, rows] sums of squares by which x is normed; None: x is not normed."""
    eps: float
    weight: Weight
    bias: Tensor | None
    out: Tensor
    epilogue: Epilogue = Epilogue.NONE
    addition: Addition | None = None
    fixed: bool = False
    """Whether a row's result must not depend on the other rows."""

    def form(self, splits: int, apart: bool = False) -> ProductForm:
        """What the product's kernel is compiled with."""
        return ProductForm(
            splits,
            parts=1 if self.squares is None else triton.next_power_of_2(len(self.squares)),
            gated=self.epilogue.gates,
            gelu=self.epilogue is Epilogue.GELU_GATE,
            adds=self.addition is not None,
            apart=apart,
        )

    def results(self, tiles: int, sums: int) -> ProductResults:
        """Where the product writes its results. sums: how many programs leave to each other, of
        tiles that they share."""
        stream, norm, scaled, squares = self.addition or (self.out,) * 4
        partial = arrivals = self.out
        if sums:
            partial = torch.empty(sums, dtype=torch.float32, device=self.x.device)
            arrivals = counters(self.x.device, tiles)
        return ProductResults(stream, norm, self.out, scaled, squares, partial, arrivals)

    @property
    def sizes(self) -> ProductSizes:
        """What the kernel is given as numbers."""
        parts, held = (0, 0) if self.squares is None else self.squares.shape
        return ProductSizes(self.out.shape[1], self.x.shape[1], parts, held, self.eps)


@triton.jit
def over_rms(squares, sizes, row, real, depth, PARTS: tl.constexpr):
    """One over the root mean square of each row, by parts of its sum of squares [parts, held].

    sizes: with `parts`, `held` and `eps`, as `ProductSizes` has them.
    """
    part = tl.arange(0, PARTS)
    at = squares + part[:, None] * sizes.held + row[None, :]
    found = tl.load(at, mask=(part < sizes.parts)[:, None] & real[None, :], other=0.0)
    return tl.rsqrt(tl.sum(found, 0) / depth + sizes.eps)


@triton.jit
def left(part, at, split, arrivals, tile, SPLITS: tl.constexpr):
    """Leave a program's sums of a shared tile; returns whether those of all programs are there."""
    tl.store(at + split * (part.shape[0] * part.shape[1]), part)
    # one thread counts for all: they have stored by then
    tl.debug_barrier()
    return tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1


@triton.jit
def gathered(at, arrivals, tile, SPLITS: tl.constexpr):
    """The sums of all programs of a tile, in their order; sets their count to zero."""
    tl.store(arrivals + tile, 0)
    tl.debug_barrier()
    # in one order, whichever program came last: the bits of a sum do not depend on it
    total = tl.zeros(at.shape, tl.float32)
    for other in tl.static_range(SPLITS):
        # past L1, which does not see what other multiprocessors write
        total += tl.load(at + other * (at.shape[0] * at.shape[1]), cache_modifier=".cg")
    return total
