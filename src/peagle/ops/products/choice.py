"""Which kernel computes a product: the first, in order, that takes it."""

from peagle.ops.linear import Linear
from peagle.ops.products.cublas import CuBLAS
from peagle.ops.products.few_rows import BatchInvariant, FewRows, WeightOnly
from peagle.ops.products.normed import Normed
from peagle.ops.products.plain import Plain
from peagle.ops.products.product import Epilogue
from peagle.ops.products.quantized_activations import QuantizedActivations
from peagle.ops.products.widened import Widened
from peagle.ops.triton import Kernels

PLAIN = Plain()
LAUNCHES = Kernels("few_rows")
KERNELS: tuple[Plain, ...] = (
    BatchInvariant(),
    QuantizedActivations(),
    Widened(),
    WeightOnly(),
    FewRows(),
    CuBLAS(),
    PLAIN,
)
"""On a GPU; the last one, and elsewhere the only one, takes every product."""


def choose(x: Normed, layer: Linear, epilogue: Epilogue) -> Plain:
    """The kernel for `x @ weight.T` and what follows."""
    if LAUNCHES.chosen(x.x) is None:
        return PLAIN
    return next(kernel for kernel in KERNELS if kernel.takes(x, layer, epilogue))
