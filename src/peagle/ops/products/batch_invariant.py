"""Products whose rows do not depend on what other rows there are, for layers that ask for it."""

from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.products.cublas import CuBLAS
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Product
from peagle.ops.triton import kernels
from peagle.ops.weight import QuantizedWeight, Weight


class BatchInvariant(CuBLAS):
    """Every product of such a layer on a GPU; what is around it has launches of its own."""

    def takes(self, product: Product, x: Normed, layer: Linear) -> bool:
        return layer.batch_invariant and x.squares is None and covers(layer.weight)

    def linear(self, x: Normed, layer: Linear) -> Tensor:
        return kernels("few_rows").invariant(x.x, layer.weight, layer.bias)


def covers(weight: Weight) -> bool:
    """Whether such a kernel multiplies a weight where it is."""
    if isinstance(weight, QuantizedWeight):
        return kernels("skinny_product").takes(weight, weight.device)
    return isinstance(weight, Tensor)
