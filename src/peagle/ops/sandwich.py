"""What a sandwich block adds to the residual stream, normed before it is added."""

from dataclasses import dataclass

from torch import Tensor

from peagle.ops.moe import ScaledExperts
from peagle.ops.norm import RMSNorm, normalized, rms_norm
from peagle.ops.products.normed import Normed
from peagle.ops.triton import has_kernels, kernels


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


def add_before_mixture(
    product: Tensor, own: RMSNorm, stream: Tensor, norm: RMSNorm, mixture: Mixture
) -> tuple[Tensor, MixtureInputs]:
    """`stream + own(product)`, and what the mixture reads of it.

    norm: the MLP's. All norms have one eps.
    """
    to_experts, scale = mixture.input_norm, mixture.experts.router_scale
    if has_kernels(stream):
        weights = norm.weight, to_experts.weight, scale
        total, dense, *others = kernels("sandwich").add_before_mixture(
            product, own.weight, stream, *weights, norm.eps
        )
        return total, MixtureInputs(Normed(dense, None, norm.eps), *others)
    total, dense = add(product, own, stream, norm)
    read = rms_norm(total, to_experts.weight, to_experts.eps)
    routed = mixture.experts.scaled(normalized(total, norm.eps))
    return total, MixtureInputs(dense, read, routed)


def add_mixture(
    dense: Tensor, inputs: MixtureInputs, mixture: Mixture, stream: Tensor, norm: RMSNorm
) -> tuple[Tensor, Normed]:
    """The stream after a mixture, and the same under the next norm.

    dense: [rows, hidden_size], what the MLP gives; stream: alike, the one that `inputs` are of.
    """
    summands = mixture.experts.summands(inputs.experts, inputs.router)
    of_dense, of_experts, own = mixture.dense_norm, mixture.experts_norm, mixture.norm
    if has_kernels(stream):
        weights = of_dense.weight, of_experts.weight, own.weight
        given = weights, own.eps, stream, mixture.scalar, norm.weight, norm.eps
        total, under = kernels("sandwich").add_mixture(dense, summands, *given)
        return total, Normed(under, None, norm.eps)
    product = rms_norm(dense, of_dense.weight, of_dense.eps)
    product = product + rms_norm(summands.sum(dim=1), of_experts.weight, of_experts.eps)
    return add(product, own, stream, norm, mixture.scalar)
