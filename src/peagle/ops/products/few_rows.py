"""Products of few rows, bound by reading their weights, in one launch with what is around them."""

from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.products.cublas import CuBLAS
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Epilogue
from peagle.ops.triton import kernels
from peagle.ops.weight import QuantizedWeight, Weight

MOST_ROWS, UNIT = 64, 16
"""Rows up to which a tensor's tile (`ops.triton.tiles`) beats cuBLAS, where this number divides the
depth, and a product leaves its sums of squares for the next one."""


class FewRows(CuBLAS):
    """Those of tensors; where gated, no bias."""

    def takes(self, x: Normed, layer: Linear, epilogue: Epilogue) -> bool:
        rows, depth = x.x.shape
        return rows <= MOST_ROWS and not depth % UNIT and super().takes(x, layer, epilogue)

    def linear(self, x: Normed, layer: Linear) -> Tensor:
        return kernels("few_rows").linear(x.x, x.squares, x.eps, layer.weight, layer.bias)

    def gated(self, x: Normed, layer: Linear, gate: Epilogue) -> Tensor:
        return kernels("few_rows").gated(x.x, x.squares, x.eps, layer.weight, gate)

    def add(self, x: Normed, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
        fast = kernels("few_rows")
        total, scaled, squares = fast.add(x.x, layer.weight, layer.bias, stream, norm.weight)
        return total, Normed(scaled, squares, norm.eps)


class WeightOnly(FewRows):
    """Weights of few bits, read as they are and widened in registers; inputs in 16 bits."""

    def takes(self, x: Normed, layer: Linear, epilogue: Epilogue) -> bool:
        return isinstance(layer.weight, QuantizedWeight) and covers(layer.weight)

    def gated(self, x: Normed, layer: Linear, gate: Epilogue) -> Tensor:
        return (FewRows if layer.bias is None else CuBLAS).gated(self, x, layer, gate)

    def add(self, x: Normed, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
        return (FewRows if len(x.x) <= MOST_ROWS else CuBLAS).add(self, x, layer, stream, norm)


class BatchInvariant(CuBLAS):
    """Products whose rows do not depend on what other rows there are, for layers that ask for it;
    what is around them has launches of its own."""

    def takes(self, x: Normed, layer: Linear, epilogue: Epilogue) -> bool:
        return layer.batch_invariant and x.squares is None and covers(layer.weight)

    def linear(self, x: Normed, layer: Linear) -> Tensor:
        return kernels("few_rows").invariant(x.x, layer.weight, layer.bias)


def covers(weight: Weight) -> bool:
    """Whether kernels of few rows multiply a weight where it is."""
    if isinstance(weight, QuantizedWeight):
        return kernels("skinny_product").takes(weight, weight.device)
    return True
