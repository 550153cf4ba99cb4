"""recipes/smollm2 with a tiny target: from its own questions to a measured drafter."""

import gzip
import json
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_target
from tiny_gguf import save_wheel
from tiny_pair import MASK, VOCAB, save_tokenizer

from peagle.errors import InputError

RECIPES = Path(__file__).parents[2] / "recipes" / "smollm2"
ENDS = list(range(0, VOCAB, 30))
"""An untrained target emits one of these after some thirty tokens."""
ANSWERS = ["--max-tokens", 40, "--keep-cut", "--dtype", "float32"]
SMALL = [
    "num_speculative_tokens=4",
    "row_length=96",
    "rows_per_step=2",
    "rows_per_pass=2",
    "steps=4",
    "evaluate_every=2",
    "validation_documents=4",
]
SIZES = ["num_hidden_layers=1", "taps=[1,2,3]"]
OF_METHOD = {
    "eagle3": [*SIZES, "draft_vocab_size=64"],
    "peagle": [*SIZES, "draft_vocab_size=64"],
    "chat": [*SIZES, "draft_vocab_size=64", "intermediate_size=64"],
    "selector": [],
    "dflash": [*SIZES, "anchors=4"],
}
"""Each recipe's own keys, small."""


def script(name: str) -> ModuleType:
    spec = util.spec_from_file_location(f"smollm2_{name}", RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2") / "target"
    save_target(directory, "llama", vocab_size=VOCAB, max_position_embeddings=512)
    save_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return directory


@pytest.fixture
def tokens(monkeypatch) -> ModuleType:
    module = script("tokens")
    monkeypatch.setattr(module, "NEVER_WRITTEN", frozenset({MASK}))
    return module


def lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


@pytest.mark.slow
def test_from_questions_to_measured_drafters(peagle, tokens, target, tmp_path):
    def run(*arguments) -> str:
        result = peagle(*arguments)
        assert result.code == 0, result.err
        return result.out

    greedy, drawn = tmp_path / "greedy.jsonl", tmp_path / "drawn.jsonl"
    run("regenerate", target, "--self-prompted", 16, *ANSWERS, "--output", greedy)
    questions = tmp_path / "greedy.questions.jsonl"
    run("regenerate", target, questions, "--temperature", 1, *ANSWERS, "--output", drawn)
    tokens.main([greedy, drawn], target, tmp_path, [0.0002, 0.0004])
    few, many = (lines(tmp_path / f"{size}M.jsonl.gz") for size in ("0.0002", "0.0004"))
    assert 0 < len(few) < len(many)
    assert many[: len(few)] == few

    drafters = {name: tmp_path / name for name in OF_METHOD}
    for name, output in drafters.items():
        masked = [] if name == "eagle3" else [f"mask_token_id={MASK}"]
        begun = [f"initial_drafter={drafters['peagle']}"] if name == "selector" else []
        keys = [f"target={target}", f"data=[{tmp_path / '0.0004M.jsonl.gz'}]", f"output={output}"]
        recipe = RECIPES / f"{name}.yaml"
        run("train", recipe, *keys, *SMALL, *OF_METHOD[name], *masked, *begun)
        run("check", output, "--target", target)
        assert "embed_tokens.weight" not in load_file(output / "model.safetensors")
    both = drafters["peagle"], drafters["selector"]
    plain, corrected = (load_file(each / "model.safetensors") for each in both)
    assert all(torch.equal(plain[name], corrected[name]) for name in plain)
    assert (drafters["selector"] / "correction").is_dir()

    chats = tmp_path / "mt.jsonl"
    chats.write_text(json.dumps({"turns": ["def name(self):", "return"]}) + "\n")
    code = tmp_path / "he.jsonl"
    code.write_text(json.dumps({"prompt": "for item in items:\n"}) + "\n")
    flags = ["--chat", "--prompts", chats, "--prompts", code, "--temperature", "0,1", "--k", 3]
    pair = ["--eagle3", drafters["eagle3"], "--peagle", drafters["selector"]]
    brief = ["--max-tokens", 8, "--rounds", 1, "--dtype", "float32", "--json", tmp_path / "r.json"]
    run("bench", target, *pair, *flags, *brief)
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert len(runs) == 3 * 2 * 2
    assert all(one["same_text"] for one in runs if one["method"] != "none")


def test_token_files_hold_whole_answers_and_no_mask(tokens, target, tmp_path):
    answers = tmp_path / "answers.jsonl"
    written = [[40, 41], [42, MASK], [43, 44, 45]]
    answers.write_text(
        "".join(json.dumps({"prompt_token_ids": [9], "token_ids": ids}) + "\n" for ids in written)
    )
    tokens.main([answers], target, tmp_path, [5e-6])
    found = [json.loads(line) for line in lines(tmp_path / "5e-06M.jsonl.gz")]
    assert sorted(one["token_ids"] for one in found) == [[40, 41], [43, 44, 45]]
    with pytest.raises(InputError, match="have 5 tokens, not 6; write more"):
        tokens.main([answers], target, tmp_path, [6e-6])


def test_the_target_is_compared_with_its_file(target, tmp_path, capsys):
    wheel = save_wheel(target, tmp_path / "tiny.whl")
    script("target").main(wheel, tmp_path / "out")
    told = capsys.readouterr().out
    assert "0.2M parameters in bfloat16" in told
    assert 0 < float(told.partition("KL at most ")[2].split()[0]) < 1e-2
