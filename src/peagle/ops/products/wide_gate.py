"""Gates of hundreds of rows on Hopper, taken while the product is still in registers."""

from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.products.cublas import CuBLAS
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Product
from peagle.ops.triton import kernels, on_hopper


class WideGate(CuBLAS):
    """Gates alone, and only of rows that are divided by their rms."""

    def takes(self, product: Product, x: Normed, layer: Linear, live: Tensor | None = None) -> bool:
        if not (product.dense and product.gated) or layer.bias is not None or x.squares is not None:
            return False
        return on_hopper(x.x) and kernels("wide_gate").takes(x.x, layer.weight, live)

    def gated(self, x: Normed, layer: Linear, live: Tensor | None = None) -> Tensor:
        return kernels("wide_gate").gated(x.x, layer.weight, live)
