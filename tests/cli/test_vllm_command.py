"""vLLM's command lines: every flag of its `serve` has its class here."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from peagle.cli.app import app
from peagle.cli.vllm_command import Command, read_command
from peagle.cli.vllm_flags import vllm_flags
from peagle.errors import InputError

FLAGS: list[dict[str, Any]] = [
    json.loads(line)
    for line in Path(__file__).with_name("vllm_flags.jsonl").read_text().splitlines()
]
"""The flags of vLLM 0.33's `serve`, from its parser but for --model and --config: names, what turns
it off, a value, the default, and our class."""
OLDER = {
    *("--cuda-graph-sizes", "--enable-reasoning", "--guided-decoding-backend", "--rope-scaling"),
    *("--max-seq-len-to-capture", "--rope-theta", "--swap-space", "--task", "--tp"),
}
"""Flags of earlier versions, and one that cards print."""


@pytest.fixture(scope="module")
def serve() -> Any:
    """The command."""
    commands: Any = typer.main.get_command(app)
    return commands.commands["serve"]


@pytest.fixture
def read(serve: Any) -> Callable[..., Command]:
    """Reads the words after `serve`."""
    return lambda *words: read_command(words, serve.params)


def given(flag: dict[str, Any], place: int = 0) -> list[str]:
    """A flag under one of its names, with its value."""
    return [flag["names"][place], *([flag["value"]] if "value" in flag else [])]


def of(kind: str) -> list[dict[str, Any]]:
    return [flag for flag in FLAGS if flag["class"] == kind]


def joined(parts: Sequence[Sequence[str]]) -> list[str]:
    return [word for part in parts for word in part]


def test_the_table_has_the_flags_of_vllm_and_no_others():
    names = {name for flag in FLAGS for name in (*flag["names"], *flag.get("off", ()))}
    on = {flag.name for flag in vllm_flags().values()}
    values = {"--dtype", "--max-model-len"}
    assert on - values - names <= OLDER
    ours = {name for flag in of("same") for name in (*flag["names"], *flag.get("off", ()))}
    assert names <= ours | vllm_flags().keys()
    assert len(FLAGS) == 318


@pytest.mark.parametrize("place", [0, -1])
def test_what_changes_nothing_is_taken_without_a_word(read, place: int):
    assert read("t", *joined([given(flag, place) for flag in of("quiet")])) == Command(["t"], [])


@pytest.mark.parametrize("place", [0, -1])
def test_what_one_would_expect_to_matter_has_a_line(read, place: int):
    flags = [given(flag, place) for flag in of("told")]
    command = read("t", *joined(flags))
    assert command.words == ["t"]
    for words, line in zip(flags, command.said, strict=True):
        assert line.startswith(f"{' '.join(words)}: ")


@pytest.mark.parametrize("place", [0, -1])
def test_what_means_the_same_reaches_the_command(read, serve, place: int):
    command = read("t", *joined([given(flag, place) for flag in of("same")]))
    assert command.said == []
    context = serve.make_context("serve", command.words)
    taken = {name for name, value in context.params.items() if value is not None}
    assert taken >= {"drafter", "k", "kv_cache_memory", "drain_seconds", "root_path", "revision"}
    assert (context.params["max_model_len"], context.params["kv_cache_memory"]) == (32_000, 1 << 30)
    flags = [word for word in command.words if word.startswith("--")]
    assert len(flags) == len(of("same"))


@pytest.mark.parametrize("flag", of("refused"), ids=lambda flag: flag["names"][0])
def test_what_cannot_be_kept_is_refused_with_what_to_do(read, flag: dict[str, Any]):
    words = given(flag, -1)
    with pytest.raises(InputError) as refusal:
        read("t", *words)
    told = str(refusal.value)
    assert told.startswith(f"{' '.join(words)}: ")
    assert "\n" not in told
    if "with vLLM: " in told:
        assert told.endswith(" --engine vllm")


def test_what_is_off_or_as_by_default_is_never_refused(read):
    off = joined([flag["off"] for flag in FLAGS if "off" in flag])
    ours = ["--no-enable-prefix-caching"]
    assert read("t", *off) == Command(["t", *ours], [])
    defaults = [[flag["names"][0], flag["default"]] for flag in FLAGS if "default" in flag]
    assert len(defaults) > 100
    read("t", *joined(defaults))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("t --max_model_len 9", "t --max-model-len 9"),
        ("t --max-model-len=9", "t --max-model-len 9"),
        ("t --max-model-len 9 --max-model-len 8", "t --max-model-len 8"),
        ("t --max-model-len 32K", "t --max-model-len 32768"),
        ("t --max-num-batched-tokens 1.5k", "t --max-num-batched-tokens 1500"),
        ("t --max-model-len auto", "t"),
        ("t --max-model-len -1", "t"),
        ("t --disable-prefix-caching", "t --no-enable-prefix-caching"),
        ("t --served-model-name a b", "t --served-model-name a --served-model-name b"),
        ("t --served-model-name=a --port 9", "t --served-model-name a --port 9"),
        ("t --api-key a --api-key b", "t --api-key a --api-key b"),
        ("--api-key a --api-key b", "--api-key a --api-key b"),
        ("--model t --port 9", "--target t --port 9"),
        ("--enforce-eager t", "t --enforce-eager"),
        ("t --spec-model d --spec-tokens 3 --spec-method eagle3", "t --drafter d --k 3"),
        ("t --speculative-model d --num-speculative-tokens 3", "t --drafter d --k 3"),
        ("t --tensor-parallel 1 -tp 1 -tp=1", "t"),
        ("t --swap-space 4 --disable-log-requests --no-enable-log-requests", "t"),
        ("t --enable-lora --no-enable-lora", "t"),
        ("t -O2 --quantization fp8 --kv-cache-dtype float16", "t"),
        ("t --kv-cache-dtype auto", "t --kv-cache-dtype auto"),
    ],
)
def test_forms_of_flags(read, line: str, words: str):
    command = read(*line.split())
    assert command.words == [word for word in words.split() if word != "--enforce-eager"]


def test_keys_of_a_flags_object_may_be_flags(read):
    line = "t --default-chat-template-kwargs.a.b=true --default-chat-template-kwargs.a.c x"
    flag = "--default-chat-template-kwargs"
    assert read(*line.split()).words == ["t", flag, '{"a": {"b": true, "c": "x"}}']
    [said] = read("t", "-cc.pass_config.fuse=True", "--compilation_config.mode", "3").said
    assert said.startswith('--compilation-config {"mode": 3}: ')


def test_a_file_of_flags(read, tmp_path: Path):
    file = tmp_path / "flags.yaml"
    file.write_text(
        "port: 9\nserved-model-name: [a, b]\nenforce_eager: false\nenable-prefix-caching: false\n"
        "speculative-config: {model: d, num_speculative_tokens: 3}\nkv-cache-dtype: fp8\n"
    )
    command = read("t", "--config", str(file), "--port", "8")
    assert command.words == [
        *("t", "--served-model-name", "a", "--served-model-name", "b"),
        *("--no-enable-prefix-caching", "--speculative-config"),
        *('{"model": "d", "num_speculative_tokens": 3}', "--kv-cache-dtype", "fp8", "--port", "8"),
    ]
    assert command.said == []
    with pytest.raises(InputError, match=r"nowhere\.yaml cannot be read"):
        read("t", "--config", "nowhere.yaml")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("t --kv-cache-dtype", "--kv-cache-dtype: expected one argument"),
        ("t --kv-cache-dtype --port 9", "--kv-cache-dtype: expected one argument"),
        ("t --enforce-eager=yes", "--enforce-eager: ignored explicit argument 'yes'"),
        ("t --kv-cache", "ambiguous option: --kv-cache could match"),
        ("--served-model-name a t", "--served-model-name a t: give the target before it"),
        ("--api-key a t --port 9", "--api-key a t: give the target before it"),
        ("t --dtype float", "--dtype float: give --dtype float32"),
    ],
)
def test_what_cannot_be_read_is_told(read, line: str, told: str):
    with pytest.raises(InputError) as refusal:
        read(*line.split())
    assert str(refusal.value).startswith(told)


def test_the_command_for_vllm_is_what_was_typed_without_secrets(read):
    words = ["t", "--api-key", "sesame", "--speculative-config", '{"model": "d"}', "-tp", "2"]
    with pytest.raises(InputError) as refusal:
        read(*words)
    start = 'peagle serve t --api-key ... --speculative-config \'{"model": "d"}\' -tp 2'
    told = f"-tp 2: peagle's engine uses one GPU; with vLLM: {start} --engine vllm"
    assert str(refusal.value) == told


def test_where_vllm_is_started_its_flags_stay_as_they_are(read):
    theirs = [
        "-sc",
        "{}",
        "--max_model_len",
        "32k",
        "-tp",
        "2",
        "--dtype",
        "half",
        "--spec-tokens=3",
    ]
    command = read("--engine", "vllm", "t", *theirs)
    assert command.flags == {"--engine": ["vllm"], "--max-model-len": ["32k"], "--dtype": ["half"]}
    assert command.vllms == ["-sc", "{}", "-tp", "2", "--spec-tokens=3"]
