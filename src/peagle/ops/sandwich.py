"""What a sandwich block adds to the residual stream, normed before it is added."""

from torch import Tensor

from peagle.ops.norm import RMSNorm, rms_norm
from peagle.ops.products.normed import Normed
from peagle.ops.triton import has_kernels, kernels


def add(
    product: Tensor, own: RMSNorm, stream: Tensor, norm: RMSNorm, scalar: Tensor | None = None
) -> tuple[Tensor, Normed]:
    """`(stream + own(product)) * scalar`, and the same under the next norm.

    product, stream: [rows, hidden_size]; scalar: [1], None for 1.
    """
    if has_kernels(stream):
        norms = norm.weight, norm.eps
        total, under = kernels("sandwich").add(product, own.weight, own.eps, stream, scalar, *norms)
        return total, Normed(under, None, norm.eps)
    total = stream + rms_norm(product, own.weight, own.eps)
    if scalar is not None:
        total = total * scalar
    return total, Normed(rms_norm(total, norm.weight, norm.eps), None, norm.eps)
