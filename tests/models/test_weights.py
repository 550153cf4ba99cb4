import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from hub_stub import hub_stub
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from tiny_pair import save_tokenizer
from torch import nn

from peagle.errors import InputError
from peagle.models import weights
from peagle.models.chat_template import render_chat
from peagle.models.tokenizer import load_tokenizer
from peagle.models.weights import (
    TensorRule,
    assemble,
    disassemble,
    finite,
    model_directory,
    read_json,
    read_tensors,
    safetensors_files,
)


def test_an_adapter_is_told_from_a_model_and_how_to_make_one_of_it(tmp_path: Path):
    """Also where its base's config.json is beside it."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    (tmp_path / "adapter_model.safetensors").touch()
    told = "is a LoRA adapter of Qwen/Qwen3-8B, .*; give Qwen/Qwen3-8B as the target, .* --lora"
    with pytest.raises(InputError, match=told):
        read_json(tmp_path / "config.json")
    with pytest.raises(InputError, match=told):
        safetensors_files(tmp_path)
    whole = tmp_path / "model.safetensors"
    whole.touch()
    assert safetensors_files(tmp_path) == [whole]


def test_a_path_that_is_a_directory_is_the_model(tmp_path: Path):
    assert model_directory(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "word", "a/b/c"]
)
def test_a_path_that_is_nothing(name: str):
    with pytest.raises(InputError, match=r"no such directory, and not a hub id of the form"):
        model_directory(name)


def test_the_home_of_nobody():
    with pytest.raises(InputError, match=r"^~nobody-of-that-name/model: Could not determine home"):
        model_directory("~nobody-of-that-name/model")


def test_a_path_that_is_a_file(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file; give the model's directory"):
        model_directory(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError("no route to host\nmore lines"), "no route to host"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, error: Exception, why: str):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(weights, "snapshot_download", fail)
    with pytest.raises(InputError, match=rf"fetching it from the hub failed: {why}$"):
        model_directory("owner/name")


def test_a_hub_that_answers_with_safetensors_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = {}

    def answer(
        name: str,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: Sequence[str] = (),
    ) -> str:
        asked[name] = asked.get(name, []) + allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(weights, "snapshot_download", answer)
    assert model_directory("owner/name") == tmp_path
    assert not any("bin" in pattern or "*.pt" in pattern for pattern in asked["owner/name"])


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_fetched_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whole: bool):
    """Also templates for tools and a drafter's correction, in folders of their own; no other's."""
    wanted = {"config.json", "tokenizer.model", "merges.txt", "chat_template.jinja"}
    correction = {"correction/config.json", "correction/model.safetensors"}
    wanted |= {"additional_chat_templates/tool_use.jinja", "hf_quant_config.json"}
    wanted |= {"model.safetensors", *correction} if whole else set()
    others = {"original/model.safetensors", "onnx/config.json", "pytorch_model.bin", "README.md"}
    others |= {"consolidated.safetensors", "consolidated.safetensors.index.json"}
    for name in {*wanted, *others, *correction, "model.safetensors"}:
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_text(name)
    with hub_stub(tmp_path / "hub") as (url, fetched):
        download = partial(snapshot_download, endpoint=url, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(weights, "snapshot_download", download)
        found = model_directory("owner/name", weights=whole)
    assert {str(path.relative_to(found)) for path in found.rglob("*.*") if path.is_file()} == wanted
    assert {*fetched} == wanted


def test_templates_of_the_hub_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "hub" / "additional_chat_templates").mkdir(parents=True)
    save_tokenizer(tmp_path / "hub")
    (tmp_path / "hub" / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    with hub_stub(tmp_path / "hub") as (url, _):
        download = partial(snapshot_download, endpoint=url, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(weights, "snapshot_download", download)
        fetched = model_directory("owner/name")
    tool = {"type": "function", "function": {"name": "f", "description": ""}}
    turns = [{"role": "user", "content": "hi"}]
    for place in (fetched, tmp_path / "hub"):
        tokenizer = load_tokenizer(place)
        assert render_chat(tokenizer, turns) == "<user>hi"
        assert render_chat(tokenizer, turns, tools=[tool]) == "with tools"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a model directory"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[1]", "must hold a JSON object"),
        pytest.param(b"[" * 100_000, "cannot be read as JSON", id="deep"),
        pytest.param(b'{"a": %s}' % (b"9" * 5000), "cannot be read as JSON", id="long number"),
    ],
)
def test_json_that_is_none(tmp_path: Path, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_json(tmp_path / "config.json")


def test_a_copy_of_before_beside_the_weights_is_not_read(tmp_path: Path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "model_backup.safetensors")
    assert read_tensors(tmp_path)["a"].tolist() == [1.0, 1.0]


def test_weights_that_are_there_twice_are_refused(tmp_path: Path):
    for name in ("one", "two"):
        save_file({"a": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InputError, match=r"a is both in one\.safetensors and .*two\.safetensors"):
        read_tensors(tmp_path)
    index = {"weight_map": {"a": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_tensors(tmp_path)["a"].tolist() == [1.0, 1.0]
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="remove the older one"):
        read_tensors(tmp_path)


def test_an_empty_directory_and_one_of_pickles(tmp_path: Path):
    with pytest.raises(InputError, match=r"has no \.safetensors file$"):
        safetensors_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match="pickle files are never loaded"):
        safetensors_files(tmp_path)


def test_a_shard_that_the_index_names_and_is_missing(tmp_path: Path):
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    with pytest.raises(InputError, match=r"lacks the weight files two\.safetensors"):
        safetensors_files(tmp_path)


@pytest.mark.parametrize("files", [{"a": None}, {"a": ["one.safetensors"]}, ["a"], None])
def test_an_index_that_names_no_files(tmp_path: Path, files: object):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(InputError, match=r"index\.json: weight_map must name a file for each"):
        safetensors_files(tmp_path)


def test_a_shard_whose_name_is_too_long(tmp_path: Path):
    index = {"weight_map": {"a": "x" * 5000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="lacks the weight files xxx"):
        safetensors_files(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 50, -1])
def test_a_file_cut_anywhere(tmp_path: Path, size: int):
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:size])
    with pytest.raises(InputError, match="is damaged or cut short"):
        read_tensors(tmp_path)


def test_parts_are_stacked_in_order_and_taken_apart_again():
    module = nn.Linear(3, 5)
    rules = [
        TensorRule("weight", ("q", "k"), (2, 3)),
        TensorRule("bias", ("b",), (5,)),
    ]
    tensors = {"q": torch.ones(2, 3), "k": torch.zeros(3, 3), "b": torch.arange(5.0)}
    assemble(module, rules, tensors)
    assert module.weight.sum(dim=1).tolist() == [3, 3, 0, 0, 0]
    again = disassemble(module, rules)
    assert {name: tensor.tolist() for name, tensor in again.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_parts_of_two_leading_dimensions():
    """As for experts: a gate and an up of each."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(2, 3, 2))
    rules = [TensorRule("weight", ("a", "b", "c", "d"), (1, 2, 1, 2), leading=2)]
    sizes = {"a": 1, "b": 2, "c": 1, "d": 2}
    tensors = {name: torch.full((size, 2), float(ord(name))) for name, size in sizes.items()}
    assemble(module, rules, tensors)
    assert "".join(chr(int(value)) for value in module.weight[..., 0].flatten()) == "abbcdd"
    again = disassemble(module, rules)
    assert all(torch.equal(again[name], value) for name, value in tensors.items())
    with pytest.raises(InputError, match=r"d has shape \[1, 2\], expected \[2, 2\]"):
        assemble(module, rules, {**tensors, "d": torch.ones(1, 2)})


def test_parts_in_another_type():
    module = nn.Linear(3, 5, bias=False)
    rules = [TensorRule("weight", ("w",), (5,))]
    assemble(module, rules, {"w": torch.ones(5, 3)}, dtype=torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8"])
def test_numbers_that_are_none_are_found_in_every_type(dtype: str):
    values = torch.arange(9).to(getattr(torch, dtype))
    assert finite(values)
    assert finite(values[:0])
    if values.is_floating_point():
        values[4] = float("nan")
        assert not finite(values)


def test_every_problem_is_named_in_one_message():
    module = nn.Linear(3, 5)
    rules = [TensorRule("weight", ("q", "k"), (2, 3)), TensorRule("bias", ("b",), (5,))]
    with pytest.raises(InputError) as caught:
        assemble(module, rules, {"q": torch.ones(2, 4), "k": torch.ones(3, 3), "z": torch.ones(1)})
    assert str(caught.value) == (
        "it does not match its config.json: missing tensors: b; unexpected tensors: z; "
        "q has shape [2, 4], expected [2, 3]"
    )


def test_hundreds_of_problems_are_a_few_and_a_count():
    module = nn.Linear(3, 600)
    rules = [
        TensorRule("weight", tuple(f"w{i}" for i in range(600)), (1,) * 600),
        TensorRule("bias", tuple(f"b{i}" for i in range(600)), (1,) * 600),
    ]
    tensors = {f"{letter}{i}": torch.ones(1, 2) for letter in "wx" for i in range(600)}
    with pytest.raises(InputError) as caught:
        assemble(module, rules, tensors)
    assert str(caught.value) == (
        "it does not match its config.json: missing tensors: b0, b1, b10, b100 and 596 more; "
        "unexpected tensors: x0, x1, x10, x100 and 596 more; w0 has shape [1, 2], expected [1, 3]; "
        "w1 has shape [1, 2], expected [1, 3]; w10 has shape [1, 2], expected [1, 3]; "
        "w100 has shape [1, 2], expected [1, 3] and 596 more"
    )
