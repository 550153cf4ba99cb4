"""Products with packed weights on a GPU, which are read as they are and widened in registers."""

from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.products.cublas import CuBLAS
from peagle.ops.products.few_rows import FewRows
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Product
from peagle.ops.triton import kernels
from peagle.ops.weight import QuantizedWeight


class WeightOnly(FewRows, CuBLAS):
    """Weights of few bits, inputs in 16."""

    def takes(self, product: Product, x: Normed, layer: Linear) -> bool:
        weight = layer.weight
        packed = isinstance(weight, QuantizedWeight)
        return packed and kernels("skinny_product").takes(weight, weight.device)

    def gated(self, x: Normed, layer: Linear) -> Tensor:
        return (FewRows if layer.bias is None else CuBLAS).gated(self, x, layer)

    def add(self, x: Normed, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
        few = len(x.x) <= kernels("skinny_product").FUSED_ROWS
        return (FewRows if few else CuBLAS).add(self, x, layer, stream, norm)
