"""Whether a target that is to give each row the same results in every pass can do so here."""

from torch import nn

from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.ops.cached_attention import FIXED_ROWS
from peagle.ops.linear import Linear
from peagle.ops.moe import RoutedExperts
from peagle.ops.products.few_rows import covers


def check_batch_invariance(target: Decoder, most_drafts: int, captures: bool) -> None:
    """Raise `InputError` where results would depend on a pass's other rows all the same.

    most_drafts: of a cycle; captures: whether kernels cover the models' attention.
    """
    if most_drafts >= FIXED_ROWS:
        raise InputError(
            f"K = {most_drafts} is above {FIXED_ROWS - 1}, the most with batch_invariant"
        )
    on_a_gpu = target.embed.weight.is_cuda
    if on_a_gpu and not (captures and all(map(_covered, target.modules()))):
        raise InputError(
            "batch_invariant needs GPU kernels, and for this model there are none on this GPU"
        )


def _covered(part: nn.Module) -> bool:
    """Whether kernels cover a part's own products, if it has any."""
    if isinstance(part, RoutedExperts):
        return part.has_kernels()
    return not isinstance(part, Linear) or covers(part.weight)
