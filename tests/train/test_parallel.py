"""Two ranks against one, on the same batch."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle.errors import InputError
from peagle.models.loading import load_decoder, load_layers
from peagle.train.parallel import Ranks
from peagle.train.prepare import prepare
from peagle.train.recipe import Recipe
from peagle.train.sharding import load_sharded
from peagle.train.snapshot import kept_step, snapshot_path
from peagle.train.trainer import Trainer

HEAD = """
import json, os, sys
from torch.distributed.tensor import DTensor
from safetensors.torch import save_file
from peagle.train import feature_cache
from peagle.train.recipe import Recipe
from peagle.train.prepare import prepare

feature_cache.SHARD = 200_000
recipe, out = Recipe(**json.loads(sys.argv[1])), f"{sys.argv[2]}.{os.environ['RANK']}"
trainer = prepare(recipe)
parts = list(trainer.target.layers.parameters())
assert all(isinstance(part, DTensor) == recipe.shard_target for part in parts)
"""
FILLING = """
from torch.distributed.tensor import DTensor
from peagle.train.feature_cache import FeatureCache

def fill(cache, missing, source, tell, plain=FeatureCache.fill):
    layers = source._target.layers
    assert all(isinstance(part, DTensor) for part in layers.parameters())
    assert len(layers)
    plain(cache, missing, source, tell)

FeatureCache.fill = fill
"""
GRADIENT = """
losses = trainer.gradient(0)
save_file(dict(zip(map(str, range(100)), trainer.optimizer.gradients()), losses=losses), out)
"""
STOPPED = "trainer.run(lambda report: trainer.stop())"
STOPPED_AT_3 = """
def gradient(step, plain=trainer.gradient):
    if step == 2 and os.environ["RANK"] == "1":
        trainer.stop()
    return plain(step)

trainer.gradient = gradient
assert trainer.run(print).step == 4
"""
APART = """
from peagle.errors import InputError

trainer = prepare(recipe.model_copy(update={"seed": int(os.environ["RANK"])}))
try:
    trainer.run(print)
except InputError as error:
    assert "rank 1 has another recipe than rank 0" in str(error), error
else:
    raise AssertionError("two seeds were trained as one")
"""
TO_THE_END = """
steps = []
trainer.run(lambda report: steps.append(report.step))
assert steps[0] > 10, steps
save_file(trainer.model.state_dict(), out)
"""

pytestmark = pytest.mark.usefixtures("forked")
TwoRanks = Callable[..., list[dict[str, Tensor]]]


@pytest.fixture
def two_ranks(tmp_path: Path) -> TwoRanks:
    """Runs a script with a recipe's trainer in two processes, optionally with lines before all
    others; returns what each process saved."""
    script, found = tmp_path / "script.py", tmp_path / "found"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def run(work: str, recipe: Recipe, first: str = "") -> list[dict[str, Tensor]]:
        script.write_text(first + HEAD + work)
        subprocess.run(
            [*launch, str(script), json.dumps(recipe.model_dump()), str(found)],
            check=True,
            timeout=900,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return [load_file(path) for path in sorted(tmp_path.glob("found.*"))]

    return run


def assert_same_gradient(tensors: dict[str, Tensor], alone: Trainer, within: float):
    losses, expected = alone.gradient(0), alone.optimizer.gradients()
    torch.testing.assert_close(tensors.pop("losses").sum(), losses.sum(), rtol=within, atol=0)
    assert len(tensors) == len(expected)
    norm = sum(float(g.square().sum()) for g in expected) ** 0.5
    error = sum(
        float((tensors[str(index)] - gradient).square().sum())
        for index, gradient in enumerate(expected)
    )
    assert error**0.5 <= within * norm


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("eagle3", None),
        ("peagle", "gpt_oss"),
        pytest.param("peagle", None, marks=pytest.mark.nightly),
        pytest.param("eagle3", "qwen3_moe", marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_have_the_gradient_of_one(
    recipe_for, targets, two_ranks: TwoRanks, tmp_path: Path, method: str, target: str | None
):
    """Normalised per token, not per rank: within 1e-5 over three passes, also if sharded."""
    changes: dict[str, Any] = {"method": method, "rows_per_step": 3}
    if target:
        changes |= {"target": str(targets[target].directory), "shard_target": True}
    recipe = recipe_for(tmp_path / "out", **changes)
    for tensors in two_ranks(GRADIENT, recipe):
        assert_same_gradient(tensors, prepare(recipe), within=1e-5)


@pytest.mark.nightly
def test_a_sharded_run_resumes(recipe_for, two_ranks: TwoRanks, tmp_path: Path):
    """It takes the same steps and ends like an uninterrupted run of a single process."""
    changes: dict[str, Any] = {"rows_per_step": 3, "steps": 20, "evaluate_every": 20}
    recipe = recipe_for(tmp_path / "out", shard_target=True, **changes)
    assert not two_ranks(STOPPED, recipe)
    alone = prepare(recipe_for(tmp_path / "alone", **changes))
    alone.run(lambda report: None)
    expected = alone.model.state_dict()
    for weights in two_ranks(TO_THE_END, recipe):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_a_stop_is_heard_by_all_a_step_later(recipe_for, two_ranks: TwoRanks, tmp_path: Path):
    """Long before the ten steps of a report: whoever asks waits at most half a minute."""
    recipe = recipe_for(tmp_path / "out", rows_per_step=2, steps=20, evaluate_every=20)
    two_ranks(STOPPED_AT_3, recipe)
    assert kept_step(snapshot_path(tmp_path / "out")) == 4


def test_ranks_that_begin_otherwise_are_refused(recipe_for, two_ranks: TwoRanks, tmp_path: Path):
    two_ranks(APART, recipe_for(tmp_path / "out", rows_per_step=2))
    assert not snapshot_path(tmp_path / "out").exists()


def test_a_sharded_target_fills_a_cache(recipe_for, two_ranks: TwoRanks, tmp_path: Path):
    """One rank writes five of nine shards; the features are those of a whole target."""
    changes = {"features": "cached", "validation_documents": 4}
    recipe = recipe_for(
        tmp_path / "out", shard_target=True, feature_cache=str(tmp_path / "shared"), **changes
    )
    found = two_ranks(GRADIENT.replace("losses =", "assert not parts; losses ="), recipe, FILLING)
    alone = recipe_for(tmp_path / "out", feature_cache=str(tmp_path / "alone"), **changes)
    for tensors in found:
        assert_same_gradient(tensors, prepare(alone), within=1e-4)


def test_layers_are_read_strictly(targets, tmp_path: Path):
    """A file with one layer more than its configuration belongs to another model."""
    directory = shutil.copytree(targets["llama"].directory, tmp_path / "target")
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"unexpected tensors: model\.layers\."):
        next(load_layers(directory, torch.float32, tiny.CPU))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_layers_are_the_whole_targets(targets, name: str):
    directory = targets[name].directory
    whole = load_decoder(directory, torch.float32, tiny.CPU)
    layers = list(load_layers(directory, torch.float32, tiny.CPU))
    assert len(layers) == len(whole.layers)
    for ours, theirs in zip(layers, whole.layers, strict=True):
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for part, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(part, other)
            assert not part.requires_grad


def test_one_process_has_the_whole_target(targets):
    directory = targets["easy"].directory
    decoder = load_sharded(directory, torch.float32, tiny.CPU, Ranks())
    tokens, whole = torch.arange(9), targets["easy"].decoder
    ours, theirs = (model(tokens, tokens, tiny.causal)[0] for model in (decoder, whole))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("count", "idle"), [(4, [0, 0]), (3, [0, 1]), (1, [0, 1]), (0, [0, 0])])
def test_idle_ranks_are_known(count: int, idle: list[int]):
    assert [Ranks(rank, 2).idle(count) for rank in range(2)] == idle


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR, MASTER_PORT not set: start with torchrun"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE two is not a number of processes"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0 is not a number of processes"),
    ],
)
def test_half_a_description_of_ranks_is_told(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], words: str
):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words):
        Ranks.join(torch.device("cpu"))


def test_an_empty_number_of_ranks_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "")
    assert Ranks.join(torch.device("cpu")) == (Ranks(), torch.device("cpu"))
