"""What a sandwich block adds to the residual stream, normed before it is added."""

from dataclasses import dataclass

from torch import Tensor

from peagle.ops.moe import ScaledExperts
from peagle.ops.norm import RMSNorm, normalized, rms_norm
from peagle.ops.products.normed import Normed
from peagle.ops.triton import in_kernels


@dataclass(frozen=True)
class Mixture:
    """The parts of a sandwich block that has experts beside its MLP, all norms with one eps."""

    experts: ScaledExperts
    input_norm: RMSNorm
    """The norm of what the experts read."""
    dense_norm: RMSNorm
    """The norm of what the MLP gives."""
    experts_norm: RMSNorm
    """The norm of what the experts give."""
    norm: RMSNorm
    """The norm of the sum of both."""
    scalar: Tensor
    """[1]"""


@dataclass(frozen=True)
class MixtureInputs:
    """What a mixture reads; [rows, hidden_size] each."""

    dense: Normed
    """The MLP."""
    experts: Tensor
    router: Tensor
    """Scaled."""


@in_kernels("norm")
def add(
    product: Tensor, own: RMSNorm, stream: Tensor, norm: RMSNorm, scalar: Tensor | None = None
) -> tuple[Tensor, Normed]:
    """`(stream + own(product)) * scalar`, and the same under the next norm.

    product, stream: [rows, hidden_size]; scalar: [1], None for 1.
    """
    total = stream + rms_norm(product, own.weight, own.eps)
    if scalar is not None:
        total = total * scalar
    return total, Normed(rms_norm(total, norm.weight, norm.eps), None, norm.eps)


@in_kernels("norm")
def add_before_mixture(
    product: Tensor, own: RMSNorm, stream: Tensor, norm: RMSNorm, mixture: Mixture
) -> tuple[Tensor, MixtureInputs]:
    """`stream + own(product)`, and what the mixture reads of it.

    norm: the MLP's. All norms have one eps.
    """
    total, dense = add(product, own, stream, norm)
    read = rms_norm(total, mixture.input_norm.weight, mixture.input_norm.eps)
    routed = mixture.experts.scaled(normalized(total, norm.eps))
    return total, MixtureInputs(dense, read, routed)


def add_mixture(
    dense: Tensor, inputs: MixtureInputs, mixture: Mixture, stream: Tensor, norm: RMSNorm
) -> tuple[Tensor, Normed]:
    """The stream after a mixture, and the same under the next norm.

    dense: [rows, hidden_size], what the MLP gives; stream: alike, the one that `inputs` are of.
    """
    summands = mixture.experts.summands(inputs.experts, inputs.router)
    return add_summands(dense, summands, mixture, stream, norm)


@in_kernels("norm")
def add_summands(
    dense: Tensor, summands: Tensor, mixture: Mixture, stream: Tensor, norm: RMSNorm
) -> tuple[Tensor, Normed]:
    """The same, of what the experts' result is the sum of: [rows, summands, hidden_size]."""
    of_dense, of_experts = mixture.dense_norm, mixture.experts_norm
    product = rms_norm(dense, of_dense.weight, of_dense.eps)
    product = product + rms_norm(summands.sum(dim=1), of_experts.weight, of_experts.eps)
    return add(product, mixture.norm, stream, norm, mixture.scalar)
