"""Products with packed weights on a GPU, which are read as they are and widened in registers."""

from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.products.cublas import CuBLAS
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Product
from peagle.ops.triton import kernels
from peagle.ops.weight import QuantizedWeight


class WeightOnly(CuBLAS):
    """Weights of few bits, inputs in 16."""

    def takes(self, product: Product, x: Normed, layer: Linear) -> bool:
        weight = layer.weight
        packed = isinstance(weight, QuantizedWeight)
        return packed and kernels("quantized_product").takes(weight, weight.device)

    def linear(self, x: Normed, layer: Linear) -> Tensor:
        fast = kernels("quantized_product")
        return fast.linear(x.x, x.squares, x.eps, layer.weight, layer.bias)

    def gated(self, x: Normed, layer: Linear) -> Tensor:
        if layer.bias is not None:
            return super().gated(x, layer)
        return kernels("quantized_product").gated(x.x, x.squares, x.eps, layer.weight)

    def add(self, x: Normed, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
        fast = kernels("quantized_product")
        if len(x.x) > fast.FUSED_ROWS:
            return super().add(x, layer, stream, norm)
        total, scaled, squares = fast.add(x.x, layer.weight, layer.bias, stream, norm.weight)
        return total, Normed(scaled, squares, norm.eps)
