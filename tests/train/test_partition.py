"""Training sees what inference sees; segments change memory, not the gradient."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from peagle.train import partition
from peagle.train.cod import Chains, Elements, depth_shares, sample_chains
from peagle.train.features import target_features
from peagle.train.loss import Comparison
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
VARIANTS: list[dict[str, Any]] = [
    {},
    {"qk_norm": False, "layers": 1},
    {"norm_output": True},
    {"fc_norm": True, "norm_before_residual": True},
    {"windows": (4, 4)},
    {"windows": (None, 6), "qk_norm": False},
]
Streams = dict[tuple[int, int], Tensor]


@torch.no_grad()
def streams(passes: Iterator[Pass]) -> Streams:
    """The residual stream of every (anchor, depth) in the loss."""
    found: Streams = {}
    for part in passes:
        pairs = zip(part.elements.anchors.tolist(), part.elements.depths.tolist(), strict=True)
        found |= zip(pairs, part.hidden, strict=True)
    return found


def check_documents_are_apart(streams_of: Callable[[Batch], Streams]) -> None:
    """Packed with others and padded, a document has the same streams as alone."""
    interrupted = Document(TOKENS[9:24], ((2, 6), (8, 14)))
    documents = [Document.answered(TOKENS[:9], 2), interrupted, Document.answered(TOKENS[24:36], 3)]
    together = streams_of(pack(documents, 26).batch(torch.arange(2)).padded(16))
    for start, document in zip((0, 9, 26), documents, strict=True):
        row = pack([document], len(document.tokens)).batch(torch.arange(1))
        for (anchor, depth), hidden in streams_of(row).items():
            packed = together.pop((anchor + start, depth))
            torch.testing.assert_close(packed, hidden, atol=1e-4, rtol=1e-4)
    assert not together


def sampled(documents: list[Document], multiple: int = 1) -> tuple[Batch, Chains]:
    """A batch padded to a multiple of `multiple` tokens."""
    batch = pack(documents, LENGTH).batch(torch.arange(1)).padded(multiple)
    generator = torch.Generator().manual_seed(3)
    return batch, sample_chains(batch, depth_shares(K, 0.8, 0.0), generator)


class Run:
    """One batch through a drafter, part by part."""

    def __init__(self, target: Any, documents: list[Document], multiple: int = 1) -> None:
        self.model = tiny.random_drafter(tiny.drafter_config(parallel=True, layers=4))
        self.batch, self.chains = sampled(documents, multiple)
        self.features = target_features(target.decoder, self.batch, self.model.config.taps)
        self._compare = Comparison(self.model, target.decoder, "kl")
        self.rows = 0

    def loss_of(self, part: Pass) -> Tensor:
        self.rows += len(part.elements)
        weights = torch.full((len(part.elements),), 1 / max(self.chains.loss_weight(1.0), 1.0))
        return self._compare.loss(part.hidden, self.features.final, part.elements.places, weights)

    def through(self, segments: int, recompute: bool = False) -> ParallelPass:
        limit = max(-(-len(self.chains.deeper()) // segments), 1)
        return ParallelPass(self.model, self.batch, self.features, self.chains, limit, recompute)

    def gradients(self) -> dict[str, Tensor]:
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return found


@pytest.fixture(autouse=True, params=[(7, 1, 1), (16, 2, 3), (1024, 128, 256)])
def sizes_of_the_dense_part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Steps small enough for a dense part, and so large that there is none."""
    for name, step in zip(("TILE", "DENSE_ROWS", "DENSE_KEYS"), request.param, strict=True):
        monkeypatch.setattr(partition, name, step)
    monkeypatch.setattr(partition, "DENSE_PAIRS", 1)


@pytest.fixture
def run(target, request: pytest.FixtureRequest) -> Run:
    return Run(target, SHAPES[request.param])


@pytest.mark.sweep
@pytest.mark.parametrize("ratio", [1.0, 0.6])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_p_eagle_is_trained_as_it_is_run(target, drafter_of, changes, ratio: float):
    """Chain (a, 0 ... K-1) stands for the drafts after x_0 ... x_{a+1}, in any segments."""
    drafter, known, depths = drafter_of(True, **changes), TOKENS[:24], 4
    model = drafter.model
    batch = pack([Document.answered(known, 1)], 27).batch(torch.arange(1))
    features = target_features(target.decoder, batch, model.config.taps)
    chains = sample_chains(batch, depth_shares(depths, ratio, 0.0), torch.Generator())
    prefixes = (known[: anchor + 2] for anchor in range(len(known) - 2))
    proposed = [tiny.propose(drafter, target.decoder, prefix, depths) for prefix in prefixes]
    for limit in (1, 7, 1000):
        found = streams(ParallelPass(model, batch, features, chains, limit).passes())
        assert len(found) == chains.lengths.sum() > 1.5 * len(known)
        logits = model.readout.logits(torch.stack(list(found.values())))
        wanted = torch.stack([proposed[anchor].logits[depth] for anchor, depth in found])
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_packed_documents_do_not_see_each_other(target, drafter_of, limit: int):
    model = drafter_of(True).model

    def streams_of(batch: Batch) -> Streams:
        features = target_features(target.decoder, batch, model.config.taps)
        chains = sample_chains(batch, [1.0] * 4, torch.Generator())
        return streams(ParallelPass(model, batch, features, chains, limit).passes())

    check_documents_are_apart(streams_of)


@pytest.mark.sweep
@pytest.mark.parametrize("run", SHAPES, indirect=True)
@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_the_gradient_is_that_of_one_pass(run: Run, segments: int):
    """In float32: at most 1e-6 of the gradient's norm."""
    whole = torch.stack([run.loss_of(part) for part in run.through(1).passes()]).sum()
    whole.backward()
    expected, rows = run.gradients(), run.rows
    run.rows = 0
    loss = run.through(segments).backward(run.loss_of)
    assert run.rows == rows == int(run.chains.lengths.sum())
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert expected.keys() == {name for name, _ in run.model.named_parameters()}
    check_gradients(run.gradients(), expected)


@pytest.mark.sweep
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_and_recomputing_do_not_change_the_gradient(
    target, monkeypatch: pytest.MonkeyPatch, shape: str
):
    plain = Run(target, SHAPES[shape])
    loss = plain.through(2).backward(plain.loss_of)
    padded, pad = Run(target, SHAPES[shape], multiple=20), Elements.padded
    assert len(padded.batch) > len(plain.batch)
    monkeypatch.setattr(Elements, "padded", lambda elements, _: pad(elements, 16))
    assert padded.through(2, recompute=True).backward(padded.loss_of).item() == pytest.approx(
        loss.item(), rel=1e-6
    )
    assert padded.rows == plain.rows
    check_gradients(padded.gradients(), plain.gradients())


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """At most 1e-6 of the norm apart."""
    assert found.keys() == expected.keys()
    error = sum(float((found[n] - expected[n]).square().sum()) for n in expected) ** 0.5
    norm = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    assert error <= 1e-6 * norm


@pytest.mark.sweep
@pytest.mark.parametrize("run", SHAPES, indirect=True)
@pytest.mark.parametrize("segments", [2, 5])
def test_what_comes_out_is_that_of_one_pass(run: Run, segments: int):
    whole, parts = (streams(run.through(count).passes()) for count in (1, segments))
    assert parts.keys() == whole.keys()
    for element, stream in whole.items():
        torch.testing.assert_close(parts[element], stream, atol=1e-4, rtol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("run", SHAPES, indirect=True)
def test_passes_have_whole_chains(run: Run):
    """D-PACE weighs a depth by those before it: of a part without depth 0 it made no numbers."""
    for part in run.through(5).passes():
        chains: dict[int, list[int]] = {}
        for anchor, depth in zip(*map(Tensor.tolist, vars(part.elements).values()), strict=True):
            chains.setdefault(anchor, []).append(depth)
        assert all(sorted(depths) == [*range(len(depths))] for depths in chains.values())


@pytest.mark.sweep
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
        run.through(segments).backward(run.loss_of)
        handle.remove()
        counted[str(segments)] = rows
    return counted


def test_no_elements_give_no_loss(target):
    run = Run(target, [Document.answered(TOKENS[:5], 5)])
    assert run.through(1).backward(run.loss_of) == 0.0
