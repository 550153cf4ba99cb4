"""Features of targets that transformers runs: proved apart, proved linear, trained from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import tiny
import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.models.foreign import ends_of, load_foreign, read_foreign_spec
from peagle.train import transformers_features
from peagle.train.packing import Document, pack
from peagle.train.prepare import prepare
from peagle.train.recipe import Recipe
from peagle.train.trainer import Telemetry
from peagle.train.transformers_features import TransformersFeatures, proved

SLOW = {"gemma2", "glm4", "mixtral"}
TARGETS = [
    pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in foreign.KINDS
]
SHARED, OWN = "documents share rows", "each document has a row of its own"


def train(recipe: Recipe) -> tuple[list[Telemetry], str]:
    """Reports of a run, and what it told before."""
    reports, told = list[Telemetry](), list[str]()
    trainer = prepare(recipe, lambda line: told.append(str(line)))
    trainer.run(reports.append)
    return reports, "\n".join(told)


def short(recipe_for: Callable[..., Recipe], output: Path, **changes: Any) -> Recipe:
    return recipe_for(output, **{"steps": 20, "evaluate_every": 10, **changes})


def load(kind: str, directory: Path) -> tuple[Any, Any]:
    spec = read_foreign_spec(foreign.save_foreign(directory, kind))
    model = load_foreign(directory, torch.float32, tiny.CPU)
    return model, ends_of(model, spec)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_drafter_for_a_foreign_target_learns(recipe_for, tmp_path: Path, kind: str):
    target = foreign.save_foreign(tmp_path / "target", kind)
    reports, told = train(short(recipe_for, tmp_path / "out", target=str(target)))
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert SHARED in told
    assert "logits are the head's" in told


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_families_that_mix_documents_get_a_row_for_each(
    targets, recipe_for, tmp_path: Path, family: str
):
    changes = {"target": str(targets[family].directory), "target_backend": "transformers"}
    reports, told = train(
        short(recipe_for, tmp_path / "out", steps=10, evaluate_every=5, **changes)
    )
    assert OWN in told
    assert reports[-1].loss < reports[0].loss


def test_qwen3_learns_the_same_from_both(recipe_for, tmp_path: Path, monkeypatch):
    def losses(name: str, **changes: str) -> Tensor:
        reports, _ = train(short(recipe_for, tmp_path / name, evaluate_every=1, **changes))
        return torch.tensor([report.loss for report in reports])

    own, packed = losses("own"), losses("packed", target_backend="transformers")
    monkeypatch.setattr("peagle.train.transformers_features.LEAK", -1.0)
    alone = losses("alone", target_backend="transformers")
    assert len(own) == 20
    torch.testing.assert_close(packed, own, atol=1e-5, rtol=0)
    torch.testing.assert_close(alone, own, atol=1e-5, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_documents_are_those_of_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
):
    """Also of a pass that is too long to pack."""
    monkeypatch.setattr(transformers_features, "LONG", 64)
    model, _ = load("cohere2", tmp_path)
    decoder = model.model.forward
    lengths: list[int] = []

    def noted(*given: Any, input_ids: Tensor, **named: Any) -> Any:
        lengths.append(input_ids.shape[1])
        return decoder(*given, input_ids=input_ids, **named)

    monkeypatch.setattr(model.model, "forward", noted)
    tokens = [(3 * i + i * i) % tiny.VOCAB for i in range(60)]
    documents = [Document.answered(tokens[:n], 2) for n in (9, 30, 14)]
    batch = pack(documents, 60).batch(torch.arange(1)).padded(64)
    features = TransformersFeatures(model, (0, 2, 4), packed)("training", torch.arange(1), batch)
    assert max(lengths) == 30
    start = 0
    for document in documents:
        ids = torch.tensor([document.tokens])
        streams = model(input_ids=ids, output_hidden_states=True).hidden_states
        own = slice(start, start := start + len(document.tokens))
        expected = torch.cat((streams[0][0], streams[2][0]), -1)
        torch.testing.assert_close(features.tapped[own, :128], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(features.final[own], streams[4][0], atol=1e-5, rtol=1e-5)
        before_the_norm = model.model.norm(features.tapped[own, 128:])
        torch.testing.assert_close(before_the_norm, streams[4][0], atol=1e-5, rtol=1e-5)
    assert not features.final[53:].any()


def test_a_planted_leak_is_found(tmp_path: Path):
    """The stream of a token takes a thousandth of the one before, whosoever that is."""
    model, ends = load("olmo2", tmp_path)

    def leak(module: Any, given: Any, stream: Tensor) -> Tensor:
        return stream + 1e-3 * stream.roll(1, dims=1)

    told: list[str] = []
    assert proved(model, ends, (1, 2), told.append).packed
    model.model.layers[0].register_forward_hook(leak)
    assert not proved(model, ends, (1, 2), told.append).packed
    assert [SHARED in told[1], OWN in told[3]] == [True, True]


def test_a_planted_scale_of_logits_is_refused(tmp_path: Path):
    model, ends = load("olmo2", tmp_path)
    model.lm_head.register_forward_hook(lambda module, given, logits: logits * 1.01)
    with pytest.raises(InputError, match=r"olmo2: its logits are not its head times .* no drafter"):
        proved(model, ends, (1, 2), print)


def test_embeddings_are_written_though_the_target_has_them(recipe_for, tmp_path: Path):
    """Others scale those of a target of theirs."""
    target = foreign.save_foreign(tmp_path / "target", "olmo2")
    train(short(recipe_for, tmp_path / "out", steps=2, method="eagle3", target=str(target)))
    files = tiny.load_file(tmp_path / "out" / "model.safetensors")
    assert {"embed_tokens.weight", "lm_head.weight"} <= files.keys()


def test_what_only_our_decoder_does_is_refused(recipe_for, tmp_path: Path):
    target = str(foreign.save_foreign(tmp_path / "target", "olmo2"))
    with pytest.raises(InputError, match="shard_target is for targets that peagle runs itself"):
        prepare(recipe_for(tmp_path / "out", target=target, shard_target=True))
    with pytest.raises(InputError, match="architecture Olmo2ForCausalLM is not supported"):
        prepare(recipe_for(tmp_path / "out", target=target, target_backend="own"))
