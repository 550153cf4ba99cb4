"""Features that a vLLM or speculators have written: files as they were recorded, and bad ones."""

import fcntl
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from openai_stub import Stub, openai_stub
from safetensors.torch import save_file
from torch import Tensor

from peagle.errors import InputError
from peagle.train.features import TargetFeatures
from peagle.train.packing import Document, pack
from peagle.train.prepare import prepare
from peagle.train.recipe import Recipe
from peagle.train.teacher import Teacher
from peagle.train.written_features import VllmFeatures

Change = Callable[[dict[str, Tensor]], Any]
LAYERS = (*tiny.TAPS, 4)


@torch.no_grad()
def recorded(decoder: Any, tokens: list[int]) -> dict[str, Tensor]:
    """What vLLM writes of a prompt: bfloat16, the last layer before the final norm."""
    batch = pack([Document.answered(tokens, 1)], len(tokens)).batch(torch.arange(1))
    streams = TargetFeatures(decoder, LAYERS)("training", torch.arange(1), batch).tapped
    states = streams.unflatten(1, (len(LAYERS), -1)).bfloat16()
    return {"hidden_states": states.contiguous(), "token_ids": torch.tensor(tokens)}


@pytest.fixture
def server(targets, tmp_path: Path) -> Iterator[Stub]:
    """A vLLM of the easy target; `change` spoils what it writes."""
    decoder, number = targets["easy"].decoder, itertools.count()

    def reply(body: dict[str, Any]) -> Any:
        tokens = body["prompt"]
        states = recorded(decoder, tokens)
        logits = decoder.logits(decoder.norm(states["hidden_states"][-1, -1].float()))
        logprobs = logits.log_softmax(-1)
        path = tmp_path / f"{next(number)}.safetensors"
        stub.change(states)
        save_file(states, path)
        Path(f"{path}.lock").touch()
        best = int(logprobs.argmax())
        told = {"token_ids": [best], "logprobs": {"token_logprobs": [float(logprobs[best])]}}
        where = {"hidden_states_path": str(path)}
        return 200, {}, {"choices": [told], "kv_transfer_params": where}

    with openai_stub() as stub:
        stub.reply, stub.change = reply, lambda states: None
        yield stub


def source(server: Stub, targets: Any, recipe_for: Callable[..., Recipe]) -> VllmFeatures:
    keys = {"features": "cached", "feature_cache": "c", "feature_source": server.url}
    teacher = Teacher.of(recipe_for(Path("out"), **keys))
    found = teacher.read_written(tiny.TAPS, torch.float32, tiny.CPU)
    assert isinstance(found, VllmFeatures)
    return found


def test_a_run_on_vllms_features_is_one_on_the_targets_own(server, recipe_for, tmp_path: Path):
    keys = {"features": "cached", "feature_cache": str(tmp_path / "cache")}
    recipe = recipe_for(tmp_path / "out", steps=2, **keys, feature_source=server.url)
    losses: list[float] = []
    prepare(recipe).run(lambda report: losses.append(report.loss))
    own = prepare(recipe_for(tmp_path / "own", steps=2))
    own.run(lambda report: losses.append(report.loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert not list(tmp_path.glob("*.lock"))
    assert not list(tmp_path.glob("*.safetensors"))
    asked = len(server.requests)
    prepare(recipe_for(tmp_path / "other", steps=3, **keys, feature_source=server.url))
    assert len(server.requests) == asked
    with pytest.raises(InputError, match="made with other backend, version or dtype; name"):
        prepare(recipe_for(tmp_path / "online", steps=3, **keys))


def last_normed(states: dict[str, Tensor]) -> None:
    states["hidden_states"][:, -1] *= 0.1


SPOILT: dict[str, tuple[Change, str]] = {
    "cut": (
        lambda s: s.update(hidden_states=s["hidden_states"][:-1].clone()),
        "prefix caching off",
    ),
    "others": (lambda s: s["token_ids"].add_(1), "holds the states of other tokens"),
    "zeros": (lambda s: s["hidden_states"][2].zero_(), "zero or not finite"),
    "nan": (lambda s: s["hidden_states"][2, 1].fill_(torch.nan), "zero or not finite"),
    "layers": (
        lambda s: s.update(hidden_states=s["hidden_states"][:, 1:].clone()),
        "the last layer",
    ),
    "names": (lambda s: s.pop("token_ids"), "has no hidden_states and token_ids"),
    "another": (lambda s: s["hidden_states"][:, -1].copy_(s["hidden_states"][:, 0]), "last layer"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_file_of_something_else_is_refused(server, targets, recipe_for, name: str):
    server.change, message = SPOILT[name]
    with pytest.raises(InputError, match=message):
        source(server, targets, recipe_for).document((5, 9, 4, 7, 30, 2))


def test_a_file_is_awaited_and_a_damaged_one_is_named(server, targets, recipe_for, tmp_path: Path):
    answer, written = server.reply, threading.Event()

    def late(body: dict[str, Any]) -> Any:
        told = answer(body)
        path = Path(told[2]["kv_transfer_params"]["hidden_states_path"])
        whole = path.read_bytes()
        path.write_bytes(whole[:100])
        lock = os.open(f"{path}.lock", os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            path.write_bytes(whole)
            written.set()
            os.close(lock)

        threading.Timer(0.2, write).start()
        return told

    server.reply = late
    features = source(server, targets, recipe_for)
    assert features.document((5, 9, 4)).final.shape == (3, 64)
    assert written.is_set()

    def damaged(body: dict[str, Any]) -> Any:
        told = answer(body)
        Path(told[2]["kv_transfer_params"]["hidden_states_path"]).write_bytes(b"half")
        return told

    server.reply = damaged
    with pytest.raises(InputError, match="is damaged or cut short"):
        features.document((5, 9, 4))


def test_a_server_without_hidden_states(server, targets, recipe_for):
    server.reply = lambda body: (200, {}, {"choices": [{"text": "x"}]})
    features = source(server, targets, recipe_for)
    with pytest.raises(InputError, match="answers without hidden states; start it as"):
        features.document((5, 9, 4))
    server.reply = lambda body: (500, {}, {"error": "the engine is dead"})
    with pytest.raises(InputError, match="does not answer: Server error '500"):
        features.document((5, 9, 4))
    with pytest.raises(InputError, match="does not answer"):
        VllmFeatures(targets["easy"].decoder, lambda s: s, tiny.TAPS, "http://127.0.0.1:9/v1")
    with pytest.raises(InputError, match="is no server's URL"):
        VllmFeatures(targets["easy"].decoder, lambda s: s, tiny.TAPS, "http://localhost:abc")


def test_speculators_directories_are_data_and_features(
    targets, recipe_for, tmp_path: Path, answers
):
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    kept = []
    directory = tmp_path / "speculators"
    for row in rows:
        ids = [*row["prompt_token_ids"], *row["token_ids"]]
        mask = [0] * len(row["prompt_token_ids"]) + [1] * len(row["token_ids"])
        kept.append({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
    Dataset.from_list(kept).save_to_disk(directory)
    for number, row in enumerate(kept):
        states = recorded(targets["easy"].decoder, row["input_ids"])
        save_file(states, directory / f"hs_{number}.safetensors")
    keys = {"features": "cached", "data": (f"hf:{directory}",), "steps": 2}
    cache, where = {"feature_cache": str(tmp_path / "cache")}, {"feature_source": str(directory)}
    losses: list[float] = []
    prepare(recipe_for(tmp_path / "out", **keys, **cache, **where)).run(
        lambda report: losses.append(report.loss)
    )
    prepare(recipe_for(tmp_path / "own", steps=2)).run(lambda report: losses.append(report.loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    for path in directory.glob("hs_*"):
        path.unlink()
    (directory / "data.ckpt").touch()
    other = {"feature_cache": str(tmp_path / "other")}
    with pytest.raises(InputError, match=r"has no hs_\*\.safetensors; pickle files are never read"):
        prepare(recipe_for(tmp_path / "third", **keys, **other, **where))
