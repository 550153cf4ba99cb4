"""Products of few rows, bound by reading their weights, with what is around them in one launch."""

import torch
import triton
from torch import Tensor

from peagle.ops.products.product import Epilogue
from peagle.ops.triton import kernels, on_hopper, skinny_product
from peagle.ops.triton.product_call import Addition, ProductCall
from peagle.ops.triton.skinny_product import LINES
from peagle.ops.triton.tiles import padded, tile_of
from peagle.ops.weight import QuantizedWeight, Weight


def linear(
    x: Tensor, squares: Tensor | None, eps: float, weight: Weight, bias: Tensor | None
) -> Tensor:
    """`(x / rms) @ weight.T + bias`; squares: the parts of the sum of squares, None for no rms."""
    return _launch(ProductCall(x, squares, eps, weight, bias, x.new_empty(len(x), len(weight))))


def invariant(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, where a row's result does not depend on the other rows."""
    out = x.new_empty(len(x), len(weight))
    return _launch(ProductCall(x.contiguous(), None, 0.0, weight, bias, out, fixed=True))


def gated(x: Tensor, squares: Tensor | None, eps: float, weight: Weight, gate: Epilogue) -> Tensor:
    """silu(gate) * up of the two halves of a product, or gelu's: [rows, len(weight) / 2]."""
    out = x.new_empty(len(x), len(weight) // 2)
    return _launch(ProductCall(x, squares, eps, weight, None, out, gate))


def add(
    x: Tensor, weight: Weight, bias: Tensor | None, stream: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`stream + x @ weight.T + bias`, that times norm, and the parts of its squares."""
    out, scaled = torch.empty_like(stream), torch.empty_like(stream)
    packed = isinstance(weight, QuantizedWeight)
    # a line of squares for each tile of outputs, as `division_of` cuts them; a tile writes sums of
    # its padding rows, too
    columns = LINES if packed else tile_of(x, len(weight), gated=False).columns
    tiles = triton.cdiv(len(weight), columns)
    squares = torch.empty(tiles, padded(len(x)), device=x.device, dtype=torch.float32)
    addition = Addition(stream, norm, scaled, squares)
    _launch(ProductCall(x, None, 0.0, weight, bias, out, Epilogue.ADD, addition))
    return out, scaled, squares


def _launch(call: ProductCall) -> Tensor:
    """Fill a call's results, by the kernel that takes it."""
    hoppers = kernels("hopper_product") if on_hopper(call.x) else None
    chosen = hoppers if hoppers is not None and hoppers.takes(call) else skinny_product
    return chosen.launch(call)
