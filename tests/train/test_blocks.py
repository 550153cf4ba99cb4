"""DFlash is trained as it is run: blocks behind many anchors, in any segments, one gradient."""

from pathlib import Path
from typing import Any

import dflash_heads as heads
import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_partition import Streams, check_gradients, streams
from torch import Tensor

from peagle.config import SamplingParams
from peagle.drafters.checkpoint import EMBEDDINGS, HEAD
from peagle.drafters.dflash_checkpoint import read_dflash, save_dflash
from peagle.drafters.diagnosis import diagnose
from peagle.drafters.methods import drafter_for
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.models.loading import load_decoder
from peagle.train import partition
from peagle.train.blocks import BlockPass
from peagle.train.cod import Chains, sample_chains
from peagle.train.features import Features, target_features
from peagle.train.initial import drafter_config, initial_drafter
from peagle.train.loss import Comparison
from peagle.train.packing import Batch, Document, pack
from peagle.train.partition import Pass
from peagle.train.prepare import prepare
from peagle.train.trainer import Telemetry

K = heads.BLOCK - 1
TOKENS = tuple(7 * i * i % 89 + 1 for i in range(60))
DOCUMENTS = [
    Document.answered(TOKENS[:30], 3),
    Document(TOKENS[30:45], ((2, 6), (8, 15))),
    Document.answered(TOKENS[45:57], 1),
]


@pytest.fixture(scope="module")
def own_target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = heads.save_target(tmp_path_factory.mktemp("target"))
    return load_decoder(directory, torch.float32, tiny.CPU)


@pytest.fixture(autouse=True)
def _dense_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small enough for these texts."""
    for name, step in (("TILE", 16), ("DENSE_ROWS", 2), ("DENSE_KEYS", 3), ("DENSE_PAIRS", 1)):
        monkeypatch.setattr(partition, name, step)


def batch_of(documents: list[Document], length: int) -> Batch:
    return pack(documents, length).batch(torch.arange(1))


def drawn(batch: Batch, most: int | None = None) -> Chains:
    return sample_chains(batch, [1.0] * K, torch.Generator().manual_seed(1), most)


@pytest.mark.parametrize("name", list(heads.LAYOUTS))
def test_every_draft_has_the_logits_that_serving_has(
    own_target: Decoder, tmp_path: Path, name: str
) -> None:
    """Chain (a, 0 ... K-1) stands for the drafts behind x_0 ... x_{a+1}, in any segments."""
    model = tiny.load_dflash(heads.save_head(tmp_path, name), own_target)
    batch = batch_of(DOCUMENTS[:1], 33)
    features = target_features(own_target, batch, model.config.taps)
    chains = drawn(batch)
    drafter, selector = drafter_for(model), model.readout.selector
    model.readout.selector = None
    proposed = {
        anchor: tiny.propose(drafter, own_target, TOKENS[: anchor + 2], K).logits
        for anchor in chains.anchors.tolist()
    }
    model.readout.selector = selector
    for limit in (1, 3 * heads.BLOCK, 1000):
        found = streams(BlockPass(model, batch, features, chains, limit).passes())
        assert len(found) == chains.lengths.sum() > 100
        logits = model.readout.logits(torch.stack(list(found.values())))
        wanted = torch.stack([proposed[anchor][depth] for anchor, depth in found])
        assert (logits - wanted).abs().max() <= 1e-5 * max(float(wanted.abs().max()), 1.0)


@pytest.mark.parametrize("name", ["mixed", "second"])
def test_documents_do_not_see_each_other(own_target: Decoder, tmp_path: Path, name: str) -> None:
    """Packed with others and padded, a document has the same streams as alone."""
    model = read_dflash(heads.save_head(tmp_path, name), own_target)

    def streams_of(batch: Batch) -> Streams:
        features = target_features(own_target, batch, model.config.taps)
        return streams(BlockPass(model, batch, features, drawn(batch), 20).passes())

    together, start = streams_of(batch_of(DOCUMENTS, 60).padded(16)), 0
    for document in DOCUMENTS:
        for (anchor, depth), alone in streams_of(batch_of([document], 30)).items():
            packed = together.pop((anchor + start, depth))
            torch.testing.assert_close(packed, alone, atol=1e-3, rtol=1e-4)
        start += len(document.tokens)
    assert not together


def loss_by_depth(compare: Comparison, features: Features) -> Any:
    def loss_of(part: Pass) -> Tensor:
        weights = 0.8 ** part.elements.depths.float()
        return compare.loss(part.hidden, features.final, part.elements.places, weights)

    return loss_of


@pytest.mark.parametrize("name", ["mixed", "second"])
def test_the_gradient_is_that_of_one_pass(tmp_path: Path, name: str) -> None:
    """In any segments: at most 1e-6 of its norm apart. In float64, since the numbers that make
    attention sharp leave 5e-6 of float32's; what segments owe is added up in float32."""
    target = load_decoder(heads.save_target(tmp_path / "target"), torch.float64, tiny.CPU)
    model = read_dflash(heads.save_head(tmp_path / "head", name), target)
    model.embed.requires_grad_(False)
    batch = batch_of(DOCUMENTS, 60)
    features = target_features(target, batch, model.config.taps)
    loss_of = loss_by_depth(Comparison(model, target, "kl"), features)
    chains = drawn(batch, most=12)
    assert len(chains.anchors) == 12

    def gradients() -> dict[str, Tensor]:
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    whole = torch.stack([*map(loss_of, BlockPass(model, batch, features, chains, 999).passes())])
    whole.sum().backward()
    expected = gradients()
    assert {"fc.weight", "hidden_norm.weight", "layers.1.attention.qkv.weight"} <= set(expected)
    for limit in (1, 20, 999):
        loss = BlockPass(model, batch, features, chains, limit).backward(loss_of)
        assert loss.item() == pytest.approx(whole.sum().item(), rel=1e-6)
        check_gradients(gradients(), expected)


def test_no_anchor_gives_no_loss(own_target: Decoder, tmp_path: Path) -> None:
    model = read_dflash(heads.save_head(tmp_path, "full"), own_target)
    batch = batch_of([Document.answered(TOKENS[:5], 5)], 6)
    features = target_features(own_target, batch, model.config.taps)
    loss_of = loss_by_depth(Comparison(model, own_target, "kl"), features)
    assert BlockPass(model, batch, features, drawn(batch), 9).backward(loss_of) == 0.0


def test_a_run_learns_and_its_head_is_served(targets: Any, recipe_for: Any, tmp_path: Path) -> None:
    """And training goes on from it: as it is, with blocks of another size."""
    target, shape = targets["easy"].decoder, {"num_hidden_layers": 2, "method": "dflash"}
    windows = {"sliding_window": 40, "full_attention_layers": (1,)}
    recipe = recipe_for(
        tmp_path / "out", **shape, **windows, steps=20, evaluate_every=20, anchors=30
    )
    reports: list[Telemetry] = []
    progress = prepare(recipe).run(reports.append)
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert progress.best_acceptance_length > 1.1
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {"fc.weight", "hidden_norm.weight"} <= tensors.keys()
    assert not {"lm_head.weight", "embed_tokens.weight"} & tensors.keys(), "the target's"
    found = diagnose(tmp_path / "out", targets["easy"].directory)
    assert found.problems == ()
    assert found.facts["block"] == "5 rows, so K is at most 4"
    assert found.config is not None
    layers = found.config.transformer.attention.values()
    assert [(each.window, each.causal) for each in layers] == [(40, True), (None, False)]
    head = drafter_for(tiny.load_dflash(tmp_path / "out", target))
    params, prompts = SamplingParams(max_tokens=16), [[i, 3, i] for i in range(6)]
    requests = tiny.run(Engine(target, head, 4, tiny.engine_config()), prompts, params)
    plain = tiny.run(Engine(target, None, 0, tiny.engine_config()), prompts, params)
    assert tiny.outputs(requests) == tiny.outputs(plain)
    done = [request.speculation for request in requests]
    measured = 1 + sum(d.accepted for d in done) / sum(d.cycles for d in done)
    assert measured == pytest.approx(progress.best_acceptance_length, abs=0.4)
    start = {"initial_drafter": str(tmp_path / "out"), "method": "dflash", "taps": None}
    start |= {"num_hidden_layers": 4, "num_speculative_tokens": 6}
    rows = pack([Document.answered((1, 2, 3, 4), 2)], 4)
    model = initial_drafter(recipe_for(tmp_path / "more", **start), target, rows)
    for name, parameter in head.model.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    shared = {"embed.weight", "readout.head.weight"}
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == shared
    assert model.config.most_tokens == 6


@pytest.mark.parametrize("name", [*heads.LAYOUTS, "reduced"])
def test_what_is_written_is_read_again(own_target: Decoder, tmp_path: Path, name: str) -> None:
    """In z-lab's layout, whichever it came in; DFlash 2 with its convolutions and selector."""
    if name == "reduced":
        head = heads.save_speculators_head(tmp_path / "head", list(range(0, heads.VOCAB, 3)))
    else:
        head = heads.save_head(tmp_path / "head", name)
    model = read_dflash(head, own_target)
    save_dflash(tmp_path / "again", model, torch.float32, frozenset({EMBEDDINGS, HEAD}))
    if name == "reduced":
        save_dflash(tmp_path / "again", model, torch.float32, frozenset({EMBEDDINGS}))
    again = read_dflash(tmp_path / "again", own_target)
    assert again.config == model.config
    tensors, expected = (load_file(d / "model.safetensors") for d in (tmp_path / "again", head))
    assert tensors.keys() - {"t2d"} == expected.keys()
    assert all(torch.equal(tensors[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": (0, 2)}, "taps 0, the embeddings, has no name in DFlash's layout; leave it out"),
        ({"initial_drafter": "capped"}, "scales or caps its logits, which training does not"),
        ({"initial_drafter": "head", "method": "peagle"}, "is DFlash's; set method to dflash$"),
    ],
)
def test_what_cannot_be_trained_is_told(
    own_target: Decoder, recipe_for: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    if "initial_drafter" in changes:
        capped = {"final_logit_softcapping": 30.0} if "method" not in changes else {}
        head = heads.save_head(tmp_path / "head", "full", **capped)
        changes = {**changes, "initial_drafter": str(head), "taps": None, "num_hidden_layers": 4}
    recipe = recipe_for(tmp_path / "out", **{"method": "dflash", **changes})
    with pytest.raises(InputError, match=message):
        drafter_config(recipe, own_target.spec)
