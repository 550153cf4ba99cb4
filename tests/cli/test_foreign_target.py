"""A drafter for a model of a family that peagle does not run, from recipe to verdict."""

import json
from pathlib import Path

import foreign
import pytest
import yaml
from openai_stub import openai_stub
from tiny_pair import VOCAB, save_tokenizer

METRICS = """
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {accepted}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's recipe, with a run of seconds; all else is derived from the target."""
    root = tmp_path_factory.mktemp("foreign")
    save_tokenizer(foreign.save_foreign(root / "target", "olmo2", vocab_size=VOCAB))
    lines = [
        {"prompt_token_ids": [5, 6, 7], "token_ids": [8 + (n + i) % 40 for i in range(30)]}
        for n in range(24)
    ]
    (root / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    values = {"target": str(root / "target"), "data": [str(root / "answers.jsonl")]}
    values |= {"output": str(root / "out"), "mask_token_id": 1, "num_speculative_tokens": 4}
    small = {"row_length": 128, "rows_per_step": 2, "num_hidden_layers": 1, "steps": 2}
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump({**values, **small, "validation_documents": 6}))
    return path


def test_the_dry_run_says_who_computes_and_who_serves(peagle, recipe: Path):
    result = peagle("train", recipe, "--dry-run")
    assert (result.code, result.err) == (0, "")
    told = " ".join(result.out.split())
    assert "features by transformers 5." in told
    assert "Olmo2ForCausalLM: not run by peagle; vLLM runs it: yes" in told


def test_it_is_trained_judged_and_fits(peagle, recipe: Path):
    target, output = str(recipe.parent / "target"), str(recipe.parent / "out")
    said = peagle("train", recipe).err
    assert "features by transformers: documents share rows" in said
    *_, meaning, serve, bench = said.splitlines()
    assert meaning.startswith("estimated AL ")
    assert serve == f"next: peagle serve {target} --drafter {output} --engine vllm"
    assert bench.startswith("then: peagle bench --url http://localhost:8000 --chat --prompts FILE")
    fits = peagle("check", output, "--target", target)
    assert (fits.code, fits.err) == (0, "")
    assert "vLLM runs it: yes" in fits.out
    other = foreign.save_foreign(recipe.parent / "other", "glm4", hidden_size=32)
    unfit = peagle("check", output, "--target", other)
    assert "it reads features of width 64, the target's hidden size is 32" in unfit.err
    assert "vLLM runs it: with --model-impl transformers" in unfit.out


def test_a_servers_counters_are_read(peagle, recipe: Path, monkeypatch: pytest.MonkeyPatch):
    with openai_stub() as stub:
        counted = [100, 90]

        def page() -> str:
            return METRICS.format(drafts=counted[0], accepted=counted[1])

        def reply(body):
            counted[0], counted[1] = counted[0] + 10, counted[1] + 15
            stub.pages["/metrics"] = page()
            return 200, {}, {"choices": [{"text": "x"}]}

        stub.reply, stub.pages["/metrics"] = reply, page()
        output = f"output={recipe.parent / 'measured'}"
        said = peagle("train", recipe, output, "--measure-url", stub.url).err
        assert "the server's AL 2.500 (6 held-out prompts, greedy, 128 tokens at most)" in said
        assert "AL 2.50 of at most 5" in said
        assert {"prompt": [5, 6, 7], "temperature": 0}.items() <= stub.requests[0][2].items()
        # a server may serve it only now: the same command asks it, and trains no more
        again = peagle("train", recipe, output, "--measure-url", f"{stub.url}/")
        assert again.code == 0
        assert "the server's AL 2.500 (6 held-out prompts" in again.err
        assert "best estimated" not in again.err
        del stub.pages["/metrics"]
        said = peagle("train", recipe, output, "--measure-url", stub.url).err
        assert f"AL was not measured: {stub.url} counts no drafts; start it with" in said
        with monkeypatch.context() as patch:
            patch.setenv("RANK", "1")
            helper = peagle("train", recipe, output, "--measure-url", stub.url)
        assert (helper.code, helper.err) == (0, ""), "torchrun's other ranks have nothing to do"
        stub.pages["/metrics"] = page()
        stub.reply = lambda body: (400, {}, {"error": {"message": "4 tokens are too many"}})
        refused = peagle("train", recipe, output, "--measure-url", stub.url)
        assert refused.code == 1
        assert "4 tokens are too many" in refused.err
        output = f"output={recipe.parent / 'another'}"
        said = peagle("train", recipe, output, "--measure-url", stub.url)
        assert said.code == 0, "a drafter was trained"
        assert "estimated AL" in said.err, "and is judged by the estimate"


@pytest.mark.parametrize("url", ["http://localhost:abc", "localhost:8000"])
def test_what_is_no_url_is_refused_before_the_training(peagle, recipe: Path, url: str):
    said = peagle("train", recipe, "--measure-url", url)
    assert said.code == 2
    assert said.err.strip().endswith("is no server's URL; give one such as http://localhost:8000")


def test_generating_with_it_is_refused(peagle, recipe: Path):
    said = peagle("generate", "--target", recipe.parent / "target", "--prompt", "x").err
    assert "architecture Olmo2ForCausalLM is not supported; peagle runs" in said
    assert "for others it trains drafters, which vLLM serves" in said
