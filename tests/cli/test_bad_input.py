"""Bad input: exit code 2, one line on stderr, and nothing written."""

import io
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.models.families import FAMILIES


@pytest.fixture(scope="module")
def bad(pair, tmp_path_factory):
    """Directories and files with one fault each."""
    root = tmp_path_factory.mktemp("bad")
    (root / "empty").mkdir()
    (root / "prompts.jsonl").write_text('{"prompt": "fine"}\n{"prompt": ')
    (root / "long.txt").write_text("x\n" + "word " * 2000)
    alter_config(pair.target, root / "other_architecture", architectures=["GPT2LMHeadModel"])
    alter_config(pair.peagle, root / "narrow", target_hidden_size=32)
    alter_config(pair.peagle, root / "vocabulary", vocab_size=299)
    alter_config(pair.peagle, root / "taps", eagle_aux_hidden_state_layer_ids=[1, 2, 9])
    alter_config(pair.peagle, root / "mask", ptd_token_id=300, pard_token=300)
    suggesting = shutil.copytree(pair.target, root / "suggesting")
    (suggesting / "generation_config.json").write_text('{"top_k": -2}')
    truncated = shutil.copytree(pair.target, root / "truncated") / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-64])
    nan = shutil.copytree(pair.peagle, root / "nan") / "model.safetensors"
    save_file(load_file(nan) | {"norm.weight": torch.full((64,), torch.nan)}, nan)
    huge = shutil.copytree(pair.target, root / "huge") / "model.safetensors"
    kept = load_file(huge)
    save_file(kept | {"model.norm.weight": torch.full_like(kept["model.norm.weight"], 3e38)}, huge)
    pickled = shutil.copytree(pair.target, root / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    return root


def alter_config(source, place, **changes):
    path = shutil.copytree(source, place) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def refused(peagle):
    def run(*arguments):
        result = peagle(*arguments)
        assert result.code == 2
        assert result.out == ""
        assert len(result.err.splitlines()) == 1, result.err
        assert result.err.startswith("peagle: ")
        return result.err

    return run


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([], "no prompt: give --prompt TEXT, --prompt - or --prompts FILE; {pair.target} is the"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "\udcff"], "not valid UTF-8"),
        (["--prompts", "absent.txt"], "absent.txt cannot be read: No such file or directory\n"),
        (["--prompts", "{bad}/prompts.jsonl"], "prompts.jsonl:2: not JSON"),
        (
            ["--prompts", "{bad}/long.txt"],
            "long.txt:2 has 10000 tokens, but the context holds 512 with at least one of output; "
            "shorten it\n",
        ),
        (["--prompt", "x", "--top-k", "5"], "temperature 0 is greedy"),
        (["--prompt", "x", "--top-p", "0"], "peagle: --top-p: Input should be greater than 0"),
        (["--prompt", "x", "--max-tokens", "0"], "peagle: --max-tokens: "),
        (["--prompt", "x", "--max-tokens", "5", "--min-tokens", "6"], "min_tokens 6 is above"),
        (["--prompt", "x", "--temperature", "nan"], "peagle: --temperature: "),
        (["--prompt", "x", "--stop", ""], "peagle: --stop: String should"),
        (["--prompt", "x", "--logprobs", "5"], "--logprobs needs --json"),
        (["--prompt", "x", "--threads", "0"], "--threads"),
        (["--prompt", "x", "--logit-bias", "{{"], "--logit-bias is not JSON"),
        (["--prompt", "x", "--device", "abacus"], "device abacus"),
        (["--prompt", "x", "--dtype", "float8"], "--dtype"),
        (["--prompt", "x", "--k", "3"], "--k needs --drafter"),
        (
            ["--prompt", "x", "--drafter", "{pair.peagle}", "--k", "0"],
            "--k: Input should",
        ),
        (["--prompt", "x", "--speculative-config", "{{"], "speculative config is not JSON"),
        (["--prompt", "x", "--speculative-config", "[]"], "must be a JSON object"),
        (
            ["--prompt", "x", "--speculative-config", '{{"model": "m", "modle": 1}}'],
            "peagle: --speculative-config: modle: no such",
        ),
        (["--prompt", "x", "--speculative-config", "{{}}", "--k", "3"], "give either"),
        (["--prompt", "x", "--speculative-config", "{{}}", "--drafter", "d"], "give either"),
        (["--prompt", "x", "other"], "other and --target {pair.target}: give the target once"),
        (["--prompt", "x", "--drafter", "{bad}/empty"], "no config.json"),
        (["--prompt", "x", "--drafter", "{bad}/narrow"], "features of width 32"),
        (["--prompt", "x", "--drafter", "{bad}/vocabulary"], "299 tokens"),
        (["--prompt", "x", "--drafter", "{bad}/taps"], "aux layers"),
        (["--prompt", "x", "--drafter", "{bad}/mask"], "mask token id 300"),
        (["--prompt", "x", "--drafter", "{bad}/nan"], "NaN or infinite"),
        (["--prompt", "x", "--drafter", "./absent"], "no such directory"),
    ],
)
def test_generate(refused, pair, bad, options, complaint):
    options = [option.format(pair=pair, bad=bad) for option in options]
    complaint = complaint.format(pair=pair)
    assert complaint in refused("generate", "--target", pair.target, *options)


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("empty", "no config.json"),
        (
            "other_architecture",
            f"peagle runs {', '.join(sorted(FAMILIES))}; for others it trains drafters",
        ),
        ("truncated", "damaged or cut short"),
        ("pickled", "pickle files are never loaded"),
        ("suggesting", "suggesting/generation_config.json: top_k: "),
        ("prompts.jsonl", "is a file"),
    ],
)
def test_a_target_that_cannot_be_used(refused, bad, target, complaint):
    assert complaint in refused("generate", "--target", bad / target, "--prompt", "x")


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "", "--prompt", "x"],
        ["generate", "--drafter", "", "--prompt", "x"],
        ["serve", ""],
        ["bench", "", "--limit", "1"],
        ["check", ""],
    ],
)
def test_an_empty_name_is_not_that_of_the_bundled_pair(refused, command):
    """As that of a shell's variable which is not set."""
    assert "name is empty" in refused(*command)


@pytest.mark.parametrize("flag", ["--json", "--report"])
def test_places_for_results_whose_names_are_too_long(refused, pair, flag):
    name = "n" * 300
    command = ["bench", "--target", pair.target, "--peagle", pair.peagle]
    assert f"{name} cannot be written: " in refused(*command, "--methods", "peagle", flag, name)


def test_logits_that_are_no_numbers(peagle, pair, bad, tmp_path):
    """From finite weights, so that it shows only in the run."""
    asked = ("generate", "--target", bad / "huge", "--prompt", "x")
    complaint = "prompt 1 ended with an error: the target's logits are NaN"
    result = peagle(*asked)
    assert (result.code, complaint in result.err.splitlines()[-1]) == (2, True)
    result = peagle(*asked, "--json")
    assert (result.code, complaint in result.err) == (2, True)
    assert json.loads(result.out)["error"].startswith("the target's logits are NaN")
    models = ["--target", bad / "huge", "--eagle3", pair.eagle3, "--peagle", pair.peagle]
    result = peagle("bench", *models, "--limit", "1", "--json", tmp_path / "out.json")
    assert result.code == 2
    assert complaint in result.err.splitlines()[-1]


def test_stdin_that_is_not_text(refused, pair, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    complaint = refused("generate", "--target", pair.target, "--prompt", "-")
    assert "stdin is not valid UTF-8 at byte 2" in complaint


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--k", "0"], "--k: Input should be greater than 0"),
        (["--k", "3,x"], "--k: Input should be a valid integer"),
        (["--concurrency", "0"], "--concurrency: Input should be greater than 0"),
        (["--concurrency", "4", "--limit", "3"], "--concurrency 4 needs as many prompts"),
        (["--limit", "0"], "a limit of 0"),
        (["--max-tokens", "0"], "peagle: --max-tokens: "),
        (["--max-tokens", "500"], "context holds 512"),
        (["--prompts", "{bad}/long.txt"], "long.txt:2 has 10000 tokens and 128 are to follow"),
        (["--methods", "none,medusa"], "'medusa' is none of none, ngram, eagle3, peagle"),
        (["--prompts", "{bad}/prompts.jsonl"], "prompts.jsonl:2: not JSON"),
        (["--peagle", "{bad}/nan"], "NaN or infinite"),
        (
            ["--peagle", "{pair.eagle3}"],
            "not P-EAGLE; set parallel_drafting to false; bench takes it as --eagle3",
        ),
        (
            ["--eagle3", "{pair.peagle}"],
            "not EAGLE-3; set parallel_drafting to true; bench takes it as --peagle",
        ),
        (["--target", "{bad}/truncated"], "damaged or cut short"),
    ],
)
def test_bench_refuses_before_it_runs_and_writes_nothing(
    refused, pair, bad, tmp_path, monkeypatch, options, complaint
):
    monkeypatch.setattr("peagle.bench.load.drive", lambda *_: pytest.fail("a run began"))
    models = ["--target", pair.target, "--eagle3", pair.eagle3, "--peagle", pair.peagle]
    options = [option.format(pair=pair, bad=bad) for option in options]
    assert complaint in refused("bench", *models, "--json", tmp_path / "out.json", *options)
    assert list(tmp_path.iterdir()) == []


def test_bench_replaces_no_file_unasked(refused, pair, tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.bench.load.drive", lambda *_: pytest.fail("a run began"))
    out = tmp_path / "out.json"
    out.write_text("kept")
    complaint = refused("bench", pair.target, "--json", out)
    assert f"{out} exists; give another name, or --force to replace it" in complaint
    assert out.read_text() == "kept"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--speculative-config", "{}", "--k", "3"], "give either --speculative-config or"),
        (["--speculative-config", "{}", "--drafter", "d"], "give either --speculative-config or"),
        (["--drafter", "a", "--peagle", "b"], "give either one drafter, or --eagle3 and --peagle"),
        (["--drafter", "./absent"], "./absent: no such directory"),
        (["--methods", "peagle"], "method peagle needs a drafter"),
        (["--json", "--limit", "2"], "--json needs a FILE, or - for stdout"),
    ],
)
def test_bench_of_contradictory_flags(refused, pair, options, complaint):
    assert complaint in refused("bench", "--target", pair.target, *options)


def test_bench_needs_a_place_for_its_result(refused, pair, tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.bench.load.drive", lambda *_: pytest.fail("a run began"))
    options = ["--target", pair.target, "--methods", "none", "--json"]
    assert "cannot be written" in refused("bench", *options, tmp_path)
    assert "cannot be written" in refused("bench", *options, tmp_path / "absent" / "out.json")


def test_a_missing_bundled_pair_names_the_recipe(refused, tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.pair.PLACE", tmp_path)
    for command in (["demo"], ["bench"], ["generate", "--prompt", "x"]):
        assert "recipes/demo" in refused(*command)
    assert "recipes/smollm2" in refused("demo", "--chat")


def test_a_wheel_is_of_the_chat_model(refused, pair, tmp_path):
    for options in ([], ["--chat", "--target", pair.target, "--peagle", pair.peagle]):
        assert "give --chat and no other" in refused("demo", "--wheel", tmp_path, *options)


def test_check_of_what_is_no_directory(refused):
    assert "no such directory" in refused("check", "./absent")
    assert "no drafter: give its directory or hub id" in refused("check")
    assert "a and --drafter b: give the drafter once" in refused("check", "a", "--drafter", "b")


def test_an_unknown_command(refused):
    assert "No such command" in refused("serv")
