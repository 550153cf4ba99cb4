"""Products of few rows, bound by reading their weights, in one launch with what is around them."""

from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.products.kernel import Kernel
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Product
from peagle.ops.triton import kernels


class FewRows(Kernel):
    """Those of which `tiles` says that a tile beats cuBLAS; where gated, without a bias."""

    def takes(self, product: Product, x: Normed, layer: Linear) -> bool:
        if not product.dense or (product.gated and layer.bias is not None):
            return False
        return kernels("tiles").takes(product)

    def linear(self, x: Normed, layer: Linear) -> Tensor:
        return kernels("few_rows").linear(x.x, x.squares, x.eps, layer.weight, layer.bias)

    def gated(self, x: Normed, layer: Linear) -> Tensor:
        return kernels("few_rows").gated(x.x, x.squares, x.eps, layer.weight)

    def add(self, x: Normed, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
        fast = kernels("few_rows")
        total, scaled, squares = fast.add(x.x, layer.weight, layer.bias, stream, norm.weight)
        return total, Normed(scaled, squares, norm.eps)
