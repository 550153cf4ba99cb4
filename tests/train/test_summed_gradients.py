"""Gradients summed within products: those of a bfloat16 drafter against a float32 one's."""

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from peagle.ops.linear import Linear
from peagle.train import partition
from peagle.train.cod import depth_shares, sample_chains
from peagle.train.features import Features
from peagle.train.loss import Comparison
from peagle.train.optimizer import DraftOptimizer
from peagle.train.packing import Document, pack
from peagle.train.partition import ParallelPass, Pass
from peagle.train.unroll import SequentialPass

TOKENS = tuple((3 * i + i * i) % tiny.MASK for i in range(96))
PARTS = ((0, 50, 4), (50, 70, 2), (70, 90, 9))
ROWS = [Document.answered(TOKENS[first:last], prompt) for first, last, prompt in PARTS]
BATCH = pack(ROWS, 96).batch(torch.arange(1))
SEVERAL, ONE = 40, 1000
"""Number of elements in a segment."""


@pytest.mark.parametrize(
    ("parallel", "limit", "recompute", "frozen"),
    [
        (True, SEVERAL, False, False),
        (True, SEVERAL, True, False),
        (True, ONE, False, True),
        (False, ONE, False, False),
        (False, ONE, False, True),
    ],
)
def test_sums_over_passes_are_the_float32_gradient(
    recipe_for, tmp_path, parallel: bool, limit: int, recompute: bool, frozen: bool
):
    model = drafter(parallel, frozen).bfloat16()
    optimizer = DraftOptimizer(model, recipe_for(tmp_path))
    exact = drafter(parallel, frozen)
    exact.load_state_dict(model.state_dict())
    for subject in (model, exact):
        for _ in range(2):
            backward(subject, parallel, limit, recompute)
    trained = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    for (name, wanted), found in zip(trained.items(), optimizer.gradients(), strict=True):
        assert wanted.grad is not None
        assert float((found - wanted.grad).norm()) < 0.1 * float(wanted.grad.norm()), name


@pytest.mark.nightly  # traces for most of a minute
def test_no_layer_is_left_uncompiled(recipe_for, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """In training and in the evaluation after it; as on a GPU, except that no code is generated."""
    for attend in (partition.ContextAttend, partition.SegmentAttend):
        monkeypatch.setattr(attend, "__call__", attend.__call__)  # as it is again afterwards
    monkeypatch.setattr(partition, "call_plainly", partition.compiled("eager"))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", partition.VARIANTS)
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    model = drafter(parallel=True, frozen=False, layers=4).bfloat16()
    DraftOptimizer(model, recipe_for(tmp_path))
    backward(model, parallel=True, limit=SEVERAL, recompute=False)
    with torch.no_grad():
        assert len(list(parallel_pass(model, drawn_for(model), SEVERAL, False).passes())) > 2


def drafter(parallel: bool, frozen: bool, layers: int = 3) -> Any:
    """In float32."""
    model = tiny.random_drafter(tiny.drafter_config(parallel=parallel, layers=layers))
    model.embed.requires_grad_(not frozen)
    model.readout.head.requires_grad_(not frozen)
    return model


def backward(model: Any, parallel: bool, limit: int, recompute: bool) -> None:
    """One pass over one batch of random features."""
    features = drawn_for(model)
    head = Linear(64, 96)
    torch.nn.init.normal_(head.weight, std=0.3)
    target: Any = SimpleNamespace(
        head=head.to(features.final.dtype), spec=SimpleNamespace(logit_softcap=None)
    )
    compare = Comparison(model, target, "kl")

    def loss_of(part: Pass) -> Tensor:
        weights = torch.full((len(part.elements),), 0.01)
        return compare.loss(part.hidden, features.final, part.elements.places, weights)

    if parallel:
        parallel_pass(model, features, limit, recompute).backward(loss_of)
    else:
        SequentialPass(model, BATCH, features, 4).backward(loss_of)


def parallel_pass(model: Any, features: Features, limit: int, recompute: bool) -> ParallelPass:
    """P-EAGLE's, with chains that are always the same."""
    shares = depth_shares(8, 0.8, 0.0)
    chains = sample_chains(BATCH, shares, torch.Generator().manual_seed(3))
    return ParallelPass(model, BATCH, features, chains, limit, recompute)


def drawn_for(model: Any) -> Features:
    """Random, in the model's dtype."""
    torch.manual_seed(7)
    drawn = torch.randn(96, 4 * 64).to(model.fc.weight.dtype)
    return Features(drawn[:, : 3 * 64], drawn[:, 3 * 64 :])
