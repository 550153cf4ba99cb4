"""Commands as cards, recipes and documentation print them, with tiny models of the same names."""

import json
import shlex
from pathlib import Path

import pytest
import tiny
from families import FAMILIES, tokenizer

from peagle.cli.app import main

COMMANDS = Path(__file__).with_name("published_commands.txt")
STANDS_IN = {
    "gpt-oss": ("gpt_oss", "gpt-oss"),
    "qwen3-coder": ("qwen3_moe", "qwen3-coder"),
    "qwen3-30b": ("qwen3_moe", "qwen3"),
    "gemma": ("gemma4", "gemma4"),
    "llama-3.2": ("llama", "llama3.2"),
    "llama": ("llama", "llama3.1"),
    "qwen3.": ("qwen3_5", "qwen3.5"),
    "qwen": ("qwen3", "qwen3"),
}
"""What a model's name holds, and the families of weights and tokenizer that stand in for it."""
LENGTH, LENGTHS = 131_072, {"qwen3_5": 262_144}
YARN = {**tiny.GPT_OSS["rope_parameters"], "factor": 32.0, "original_max_position_embeddings": 4096}


def published() -> list[tuple[str, str | None]]:
    """Each command, and what it is refused with."""
    found: list[tuple[str, str | None]] = []
    for line in COMMANDS.read_text().splitlines():
        if line.startswith("vllm serve"):
            found.append((line, None))
        elif line.startswith("> "):
            found[-1] = (found[-1][0], line.removeprefix("> "))
    return found


def names_in(words: list[str]) -> set[str]:
    """The models and drafters that a command names."""
    values = " ".join(words).replace('"', " ").split()
    return {word for word in values if word.count("/") == 1 and not word.startswith(("/", "ex"))}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which every published name is a tiny model."""
    place = tmp_path_factory.mktemp("published")
    for command, _ in published():
        for name in names_in(shlex.split(command)[2:]):
            if not (place / name).exists():
                save_model(place / name)
    template = place / "examples" / "tool_chat_template_gemma4.jinja"
    template.parent.mkdir()
    template.write_text(FAMILIES["gemma4"].template)
    return place


def save_model(place: Path) -> None:
    """A model in place of a published one, whose name says what it is."""
    name = place.name.lower()
    place.mkdir(parents=True)
    weights, words = next(found for part, found in STANDS_IN.items() if part in name)
    own = tokenizer(words)
    if any(kind in name for kind in ("eagle3", "p-eagle", ".peagle")):
        save_drafter(place, len(own), parallel="eagle3" not in name)
        return
    sizes = {"vocab_size": len(own), "eos_token_id": own.eos_token_id}
    scaling = {"rope_parameters": YARN} if weights == "gpt_oss" else {}
    length = LENGTHS.get(weights, LENGTH)
    tiny.save_target(place, weights, max_position_embeddings=length, **sizes, **scaling)
    own.save_pretrained(place)
    changes: dict[str, object] = {}
    if weights == "qwen3_5":
        tiny.add_mtp(place)
    elif "nvfp4" in name:
        changes["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    elif "awq" in name:
        changes["quantization_config"] = {"quant_method": "awq", "bits": 4}
    change_config(place, changes)


def save_drafter(place: Path, vocabulary: int, parallel: bool) -> None:
    """A drafter, in speculators' format where its name says so."""
    sizes = {"vocab_size": vocabulary, "draft_vocab": vocabulary}
    tiny.save_random_drafter(place, tiny.drafter_config(parallel, **sizes))
    if "speculator" in place.name:
        proposals = [{"proposal_type": "greedy", "speculative_tokens": 3}]
        target = f"Qwen/{place.name.partition('-speculator')[0]}"
        verifier = {"name_or_path": target, "architectures": ["Qwen3ForCausalLM"]}
        changes = {
            "speculators_model_type": "peagle" if parallel else "eagle3",
            "speculators_config": {"proposal_methods": proposals, "verifier": verifier},
        }
        change_config(place, changes)


def change_config(place: Path, changes: dict[str, object]) -> None:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(("command", "refusal"), published())
def test_it_begins_to_serve_or_is_refused_in_one_line(
    command: str,
    refusal: str | None,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    from peagle.server import run

    bind, begun = run.bind, []

    def serve(llm, settings, *_):
        begun.append(settings)
        llm.close()

    monkeypatch.chdir(models)
    monkeypatch.setattr(run, "bind", lambda host, *_: bind(host, 0))
    monkeypatch.setattr(run, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(run, "serve", serve)
    program, *words = shlex.split(command)
    assert program == "vllm"
    code = main(words)
    told = capsys.readouterr().err.splitlines()
    if refusal is None:
        assert (code, len(begun)) == (0, 1), told
    else:
        assert (code, begun) == (2, [])
        assert refusal in told[-1]
