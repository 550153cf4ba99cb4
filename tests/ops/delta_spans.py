"""Random weights and passes of a gated delta net, for tests of the operator and its kernels."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from peagle.ops.delta_net import DeltaHeads, DeltaRows, DeltaState, DeltaWeights

HEADS = DeltaHeads(2, 6, 16, 16)
DRAFTS = 5
Span = tuple[int, int, int, int]
"""Table row, position of the first row, rows, and how many of them are sure."""


def weights(heads: DeltaHeads = HEADS, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    made = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    each = heads.num_value_heads
    speeds = torch.rand(each, generator=made) * 3 + 0.2
    return DeltaWeights(
        heads,
        (0.5 * normal(heads.channels, heads.conv_width)).to(dtype),
        speeds.log(),
        normal(each),
        (1 + 0.2 * normal(heads.value_dim)).to(dtype),
        1e-6,
    )


def memory(rows: int, heads: DeltaHeads = HEADS, dtype: torch.dtype = torch.float32) -> DeltaState:
    """Of so many requests, full of what others left there."""
    state = torch.full((rows, heads.num_value_heads, heads.key_dim, heads.value_dim), float("nan"))
    kept = torch.full((rows, heads.window + DRAFTS, heads.inputs), float("nan"), dtype=dtype)
    return DeltaState(state, kept)


def rows_of(spans: Sequence[Span], accepted: Tensor) -> DeltaRows:
    requests, starts, counts, sure = (torch.tensor(each) for each in zip(*spans, strict=True))
    firsts = counts.cumsum(0) - counts
    return DeltaRows(
        requests=requests,
        starts=starts,
        firsts=firsts,
        counts=counts,
        sure=sure,
        accepted=accepted,
        most=int(counts.max()),
    )


def inputs(rows: int, seed: int, heads: DeltaHeads = HEADS) -> tuple[Tensor, Tensor]:
    """Products of a text's rows, and their gates."""
    made = torch.Generator().manual_seed(seed)
    product = torch.randn(rows, heads.channels + heads.value_width, generator=made)
    return product, torch.randn(rows, 2 * heads.num_value_heads, generator=made)


def moved(layer: DeltaState, device: torch.device) -> DeltaState:
    return DeltaState(layer.state.to(device), layer.kept.to(device))


def weights_on(given: DeltaWeights, device: torch.device) -> DeltaWeights:
    names = ("conv", "decay", "decay_bias", "norm")
    return replace(given, **{name: getattr(given, name).to(device) for name in names})
