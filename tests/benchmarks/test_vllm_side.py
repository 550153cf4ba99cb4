"""What vLLM is asked for, with vLLM made up."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.trials import Match, Trial, Work, peer_job
from peers.vllm_side import open_llm

Asked = dict[str, Any]
MATCH = Match("qwen3-30b-a3b", "none", 0, 1.0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Opens vLLM for a trial; returns the model and the settings that it was given."""

    def open_for(trial: Trial, checkpoint: Path | None = None) -> tuple[Path, Asked]:
        llm = SimpleNamespace(LLM=lambda model, **asked: (Path(model), asked))
        monkeypatch.setitem(sys.modules, "vllm", llm)
        return open_llm(peer_job(trial, Work(), checkpoint), tmp_path)

    return open_for


def test_a_checkpoint_is_read(opened, tmp_path: Path):
    model, asked = opened(Trial("vllm", MATCH, (1,)), tmp_path / "written")
    assert (model, asked["load_format"]) == (tmp_path / "written", "auto")


def test_without_one_weights_are_dummies_in_the_shapes_sizes(opened):
    model, asked = opened(Trial("vllm", MATCH, (1,)))
    assert asked["load_format"] == "dummy"
    assert json.loads((model / "config.json").read_text())["num_experts"] == 128
    assert [file.name for file in model.iterdir()] == ["config.json"]


def test_kernels_of_experts_are_vllms_choice_unless_they_are_named(opened, tmp_path: Path):
    assert "moe_backend" not in opened(Trial("vllm", MATCH, (1,)), tmp_path)[1]
    named = Trial("vllm", MATCH, (1,), moe_backend="marlin")
    assert opened(named, tmp_path)[1]["moe_backend"] == "marlin"
