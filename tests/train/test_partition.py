"""Segments change memory, not the gradient; and no element runs twice."""

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from peagle.train import partition
from peagle.train.cod import Chains, depth_shares, sample_chains
from peagle.train.features import target_features
from peagle.train.loss import LOSSES, Comparison
from peagle.train.packing import Batch, Document, pack
from peagle.train.partition import ParallelPass, Pass

K, LENGTH = 8, 96
TOKENS = tuple((3 * i + i * i) % tiny.MASK for i in range(LENGTH))
SHAPES = {
    "one document": [Document.answered(TOKENS, 8)],
    "packed": [
        Document.answered(TOKENS[:50], 4),
        Document.answered(TOKENS[50:70], 2),
        Document.answered(TOKENS[70:90], 9),
    ],
}


def sampled(documents: list[Document]) -> tuple[Batch, Chains]:
    batch = pack(documents, LENGTH).batch(torch.arange(1))
    generator = torch.Generator().manual_seed(3)
    return batch, sample_chains(batch, depth_shares(K, 0.8, 0.0), generator)


class Run:
    """One batch through a drafter, part by part."""

    def __init__(self, target: Any, documents: list[Document]) -> None:
        self.model = tiny.random_drafter(tiny.drafter_config(parallel=True, layers=4))
        self.batch, self.chains = sampled(documents)
        self.features = target_features(target.decoder, self.batch, self.model.config.taps)
        self._compare = Comparison(self.model, target.decoder, LOSSES["kl"])
        self.rows = 0

    def charge(self, part: Pass) -> Tensor:
        self.rows += len(part.elements)
        weights = torch.full((len(part.elements),), 1 / max(self.chains.weight(1.0), 1.0))
        return self._compare.loss(part.hidden, self.features.final, part.elements.places, weights)

    def through(self, segments: int) -> ParallelPass:
        limit = max(-(-len(self.chains.deeper()) // segments), 1)
        return ParallelPass(self.model, self.batch, self.features, self.chains, limit)

    def gradients(self) -> dict[str, Tensor]:
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return found


@pytest.fixture(autouse=True, params=[(7, 1, 1), (16, 2, 3), (1024, 128, 256)])
def sizes_of_the_dense_part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Steps small enough that there is a dense part, and so large that there is none."""
    for name, step in zip(("TILE", "DENSE_ROWS", "DENSE_KEYS"), request.param, strict=True):
        monkeypatch.setattr(partition, name, step)


@pytest.fixture
def run(target, request: pytest.FixtureRequest) -> Run:
    return Run(target, SHAPES[request.param])


@pytest.mark.parametrize("run", SHAPES, indirect=True)
@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_the_gradient_is_that_of_one_pass(run: Run, segments: int):
    """DESIGN section 7.5, in float32: at most 1e-6 of the gradient's norm."""
    whole = torch.stack([run.charge(part) for part in run.through(1).passes()]).sum()
    whole.backward()
    expected, rows = run.gradients(), run.rows
    run.rows = 0
    loss = run.through(segments).backward(run.charge)
    found = run.gradients()
    assert run.rows == rows == int(run.chains.lengths.sum())
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert found.keys() == expected.keys() == {n for n, _ in run.model.named_parameters()}
    error = sum(float((found[n] - expected[n]).square().sum()) for n in expected) ** 0.5
    norm = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    assert error <= 1e-6 * norm


@pytest.mark.parametrize("run", SHAPES, indirect=True)
@pytest.mark.parametrize("segments", [2, 5])
def test_what_comes_out_is_that_of_one_pass(run: Run, segments: int):
    whole, parts = (
        torch.cat([part.hidden for part in run.through(count).passes()]) for count in (1, segments)
    )
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_segments_are_even_and_keep_chains_whole(segments: int):
    _, chains = sampled(SHAPES["packed"])
    total = len(chains.deeper())
    parts = list(chains.segments(-(-total // segments)))
    assert len(parts) == segments
    assert max(map(len, parts)) < total / segments + K
    pairs = [torch.stack((part.anchors, part.depths), dim=1) for part in parts]
    everything = chains.deeper()
    assert torch.equal(torch.cat(pairs), torch.stack((everything.anchors, everything.depths), 1))
    assert all(part.depths[0] == 1 for part in parts)


def test_depth_0_does_not_run_again(run_counted: dict[str, int]):
    """Rows through the layers at 8 segments over 1: the paper's scheme runs 1.84 times as many."""
    assert run_counted["8"] == run_counted["1"]


@pytest.fixture
def run_counted(target) -> dict[str, int]:
    run = Run(target, SHAPES["one document"])
    counted = {}
    for segments in (1, 8):
        rows = 0

        def count(module: Any, args: Any, result: Tensor) -> None:
            nonlocal rows
            rows += len(result)

        handle = run.model.rest[0].register_forward_hook(count)
        run.through(segments).backward(run.charge)
        handle.remove()
        counted[str(segments)] = rows
    return counted


def test_nothing_charged_is_no_loss(target):
    run = Run(target, [Document.answered(TOKENS[:5], 5)])
    assert run.through(1).backward(run.charge) == 0.0
