"""A target's own head, trained further: what learns is what is served."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_partition import Streams, check_documents_are_apart, streams

from peagle.config import SamplingParams
from peagle.drafters.diagnosis import diagnose
from peagle.drafters.methods import drafter_for, load_network, proposer_for
from peagle.drafters.mtp import MTPHead, load_mtp, trainable_mtp
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.speculative_config import SpeculativeConfig
from peagle.train.features import Features, target_features
from peagle.train.packing import Batch, Document, pack
from peagle.train.plan import Forecast
from peagle.train.prepare import prepare
from peagle.train.recipe import Recipe
from peagle.train.snapshot import SNAPSHOT
from peagle.train.trainer import Telemetry
from peagle.train.unroll import SequentialPass

FAMILIES = ["qwen3_5", "qwen3_5_moe"]
K = 3
TOKENS = [(3 * i + i * i) % tiny.MASK for i in range(9)]
PROMPTS = [[i, 3, i, 2 * i + 1] for i in range(8)]


@dataclass(frozen=True)
class Data:
    """A target whose own head is random, and what it writes."""

    directory: Path
    answers: Path


@pytest.fixture(scope="module")
def data_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Data]:
    made: dict[str, Data] = {}

    def data(family: str) -> Data:
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            directory = tiny.add_mtp(
                tiny.save_target(root / "target", family, layer_std=0.03), 0.15
            )
            written = tiny.save_answers(root / "answers.jsonl", tiny.load_target(directory))
            made[family] = Data(directory, written)
        return made[family]

    return data


def recipe_of(data: Data, output: Path, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "target": str(data.directory),
        "data": (str(data.answers),),
        "output": str(output),
        "method": "mtp",
        "num_speculative_tokens": K,
        "row_length": 96,
        "rows_per_step": 4,
        "rows_per_pass": 2,
        "steps": 40,
        "learning_rate": 1e-2,
        "warmup_steps": 5,
        "validation_documents": 8,
        "evaluate_every": 20,
    }
    return Recipe(**{**values, **changes})


@pytest.fixture(scope="module")
def trained(data_of, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list]]:
    """Each family's directory of a head that was trained, and what its run reported."""
    runs = {}
    for family in FAMILIES:
        output, reports = tmp_path_factory.mktemp("trained") / family, list[Telemetry]()
        prepare(recipe_of(data_of(family), output)).run(reports.append)
        runs[family] = output, reports
    return runs


def drafted(directory: Path, speculation: SpeculativeConfig | None) -> tuple[list, float]:
    """Greedy texts of a target, and the drafts accepted in a cycle."""
    target = tiny.load_target(directory)
    proposer, k = proposer_for(
        speculation, lambda asked: load_network(asked, directory, target), tiny.CPU, tiny.VOCAB
    )
    engine = Engine(target, proposer, k, tiny.engine_config())
    requests = tiny.run(engine, PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True))
    counts = [request.speculation for request in requests]
    cycles = sum(count.cycles for count in counts)
    accepted = sum(count.accepted for count in counts)
    return tiny.outputs(requests), accepted / max(cycles, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_learns_and_is_served_from_its_directory(data_of, trained, family: str):
    """By vLLM's words, and as any drafter; the text is the text without."""
    directory, (output, reports) = data_of(family).directory, trained[family]
    assert reports[-1].loss < 0.6 * reports[0].loss
    plain, _ = drafted(directory, None)
    before, own = drafted(directory, SpeculativeConfig(method="mtp", num_speculative_tokens=K))
    asked = SpeculativeConfig(method="mtp", model=str(output))
    after, accepted = drafted(directory, asked)
    assert plain == before == after
    assert accepted > 1.3 * own, (own, accepted)
    assert drafted(directory, SpeculativeConfig(model=str(output)))[1] == accepted
    with pytest.raises(InputError, match="is the target's own; leave out quantization"):
        drafted(directory, SpeculativeConfig(model=str(output), quantization="fp8"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("known", [2, 3, 9])
def test_it_is_trained_as_it_is_run(data_of, family: str, known: int):
    """Where the true tokens are those that it drafts, the logits of every step are the same."""
    directory = data_of(family).directory
    target = tiny.load_target(directory)
    proposal = tiny.propose(drafter_for(load_mtp(directory, target)), target, TOKENS[:known], K)
    document = Document.answered((*TOKENS[:known], *proposal.drafts, 1), 1)
    model = trainable_mtp(directory, target, 64)
    found = streams_of(model, target, pack([document], 24).batch(torch.arange(1)))
    for depth in range(K):
        logits = model.readout.logits(found[known - 2, depth][None])[0]
        torch.testing.assert_close(logits, proposal.logits[depth], atol=1e-5, rtol=1e-5)


def streams_of(model: MTPHead, target: Any, batch: Batch) -> Streams:
    features = target_features(target, batch, model.config.taps)
    return streams(SequentialPass(model, batch, features, K).passes())


def test_it_is_trained_in_bfloat16(data_of):
    """As on a GPU, where all of a product is in one dtype."""
    directory = data_of("qwen3_5").directory
    target = tiny.load_target(directory, torch.bfloat16)
    model = trainable_mtp(directory, target, 64)
    batch = pack([Document.answered(tuple(TOKENS), 1)], 24).batch(torch.arange(1))
    rows = torch.ones(len(batch.tokens), target.embed.weight.shape[1], dtype=torch.bfloat16)
    for part in SequentialPass(model, batch, Features(rows, rows), K).passes():
        assert part.hidden.dtype == torch.bfloat16


def test_packed_documents_do_not_see_each_other(data_of):
    directory = data_of("qwen3_5").directory
    target = tiny.load_target(directory)
    model = trainable_mtp(directory, target, 64)
    check_documents_are_apart(lambda batch: streams_of(model, target, batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_parts_is_that_of_the_whole(data_of, tmp_path: Path, family: str):
    """Of a step's rows, pass by pass or together; the target's own parts have none."""
    gradients = []
    for rows in (1, 4):
        recipe = recipe_of(data_of(family), tmp_path / "out", rows_per_pass=rows)
        trainer = prepare(recipe)
        trainer.gradient(0)
        gradients.append({n: p.grad for n, p in trainer.model.named_parameters()})
    parts, whole = gradients
    learnt = {name for name, gradient in whole.items() if gradient is not None}
    assert {name for name in whole if name not in learnt} == {
        "embed.weight",
        "target_norm.weight",
        "readout.head.weight",
    }
    for name in learnt:
        torch.testing.assert_close(parts[name], whole[name], atol=1e-5, rtol=1e-3)


def test_its_tensors_go_into_the_checkpoint(data_of, trained, tmp_path: Path):
    """Of the same names and shapes as those that they replace."""
    for family in FAMILIES:
        data, (output, _) = data_of(family), trained[family]
        whole = shutil.copytree(data.directory, tmp_path / family)
        stored, learnt = (load_file(place / "model.safetensors") for place in (whole, output))
        assert {name: v.shape for name, v in learnt.items()} == {
            name: value.shape for name, value in stored.items() if name.startswith("mtp.")
        }
        save_file(stored | learnt, whole / "model.safetensors", {"format": "pt"})
        target = tiny.load_target(whole)
        beside, within = load_mtp(output, target), load_mtp(whole, target)
        for name, value in beside.state_dict().items():
            assert torch.equal(value, within.state_dict()[name]), name


def test_a_stopped_run_continues_with_the_same_weights(data_of, tmp_path: Path):
    outputs = []
    for name, stop in (("whole", 0), ("stopped", 10)):
        recipe = recipe_of(data_of("qwen3_5"), tmp_path / name, steps=20, evaluate_every=10)
        trainer = prepare(recipe)
        trainer.run(lambda told, t=trainer, at=stop: t.stop() if told.step == at else None)
        assert (tmp_path / f"{name}.{SNAPSHOT}").exists() == bool(stop)
        if stop:
            prepare(recipe).run(lambda told: None)
        outputs.append(load_file(tmp_path / name / "model.safetensors"))
    assert all(torch.equal(value, outputs[1][name]) for name, value in outputs[0].items())


def test_a_trained_head_is_trained_on_from_features_on_disk(data_of, trained, tmp_path: Path):
    """Of which the target's layers are not loaded."""
    cached = {"features": "cached", "feature_cache": str(tmp_path / "cache")}
    start = {"initial_drafter": str(trained["qwen3_5"][0]), "num_speculative_tokens": 2}
    recipe = recipe_of(data_of("qwen3_5"), tmp_path / "out", steps=10, **start, **cached)
    trainer = prepare(recipe)
    assert not trainer.target.layers
    begun = trainer.estimate().acceptance_length
    fresh = {**cached, "num_speculative_tokens": 2}
    own = prepare(recipe_of(data_of("qwen3_5"), tmp_path / "own", **fresh)).estimate()
    assert begun > own.acceptance_length
    trainer.run(lambda told: None)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["num_speculative_tokens"], values["model_type"]) == (2, "qwen3_5_text")


def test_what_a_run_takes_is_counted(data_of, tmp_path: Path):
    for family in FAMILIES:
        recipe = recipe_of(data_of(family), tmp_path / "out")
        plan, trainer = Forecast.of(recipe), prepare(recipe)
        own = [p for p in trainer.model.parameters() if p.requires_grad]
        assert plan.memory()["weights"] == sum(p.nbytes for p in own)
        counts = plan.parameters().values()
        assert sum(each.trained for each in counts) == sum(p.numel() for p in own)
        assert plan.resolved()["taps"] == (4,)
        assert plan.step.deeper == plan.step.tokens * (K - 1)
        assert plan.measure_rate(0.0) > 0


def test_a_directory_is_examined(data_of, trained, target):
    output, _ = trained["qwen3_5"]
    found = diagnose(output, data_of("qwen3_5").directory)
    assert not found.problems
    assert found.config is not None
    assert found.config.trained_tokens == K
    assert found.facts["method"].startswith("MTP")
    assert diagnose(output).problems == ()
    [problem] = diagnose(output, data_of("qwen3_5_moe").directory).problems
    assert "missing tensors: mtp.layers.0.mlp" in problem
    [problem] = diagnose(output, target.directory).problems
    assert "mtp." in problem


def test_another_target_has_none_to_train(data_of, target, tmp_path: Path):
    data = Data(target.directory, data_of("qwen3_5").answers)
    with pytest.raises(InputError, match="Qwen3ForCausalLM has no head of its own"):
        prepare(recipe_of(data, tmp_path / "out"))
