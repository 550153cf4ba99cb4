import json

import pytest

SHAPE = ["--shape", "tiny", "--random-weights", "--max-tokens", 12, "--prompt-tokens", 9]
SHAPE += ["--rounds", 1]

RANDOM = ["--random-weights", "--synthetic-acceptance", "2"]


def test_a_shape_is_measured_and_marked_synthetic(peagle, tmp_path):
    out = tmp_path / "out.json"
    methods = ["--methods", "none,peagle", "--k", "3", "--concurrency", "1,2"]
    methods += ["--draft-length", "fixed,auto"]
    result = peagle("bench", *SHAPE, *methods, "--synthetic-acceptance", 1.5, "--json", out)
    assert result.code == 0
    written = json.loads(out.read_text())
    assert "SYNTHETIC" in written["environment"]["synthetic"]
    assert result.out.count("SYNTHETIC") == 1
    assert [(run["method"], run["concurrency"]) for run in written["runs"]] == [
        ("none", 1),
        ("peagle", 1),
        ("peagle", 1),
        ("none", 2),
        ("peagle", 2),
        ("peagle", 2),
    ]
    assert {run["data"] for run in written["runs"]} == {"tiny"}
    modes = [run["draft_length"] for run in written["runs"]]
    assert modes == ["fixed", "fixed", "auto"] * 2
    assert [run["output_tokens"] for run in written["runs"]] == [12, 12, 12, 24, 24, 24]
    assert {run["same_text"] for run in written["runs"]} == {None}, "nothing to compare"


def test_a_shapes_own_head_is_measured(peagle, tmp_path):
    out = tmp_path / "out.json"
    size = ["--max-tokens", 12, "--prompt-tokens", 9, "--rounds", 1, "--json", out]
    how = ["--methods", "none,mtp", "--k", 3, "--synthetic-acceptance", 2.8, *size]
    assert peagle("bench", "--shape", "tiny-hybrid", "--random-weights", *how).code == 0
    [_, drafted] = json.loads(out.read_text())["runs"]
    assert (drafted["method"], drafted["k"], drafted["output_tokens"]) == ("mtp", 3, 12)
    assert drafted["acceptance_length"] > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "tiny"], "--random-weights"),
        (["--shape", "tiny", "--random-weights"], "--synthetic-acceptance"),
        (["--shape", "huge"], "shape huge is not known"),
        ([*SHAPE, "--k", "3", "--synthetic-acceptance", "5"], "make at most 4"),
        ([*SHAPE, "--k", "3", "--synthetic-acceptance", "0.5"], "at least 1 token"),
        ([*SHAPE, "--synthetic-acceptance", "2", "--target", "x"], "leave out targets, drafters"),
        ([*SHAPE, "--methods", "none", "--prompts", "x"], "leave out targets, drafters"),
        ([*SHAPE, "--methods", "none", "--temperature", "1"], "--shape runs greedy"),
        ([*SHAPE, "--methods", "none", "--prompt-tokens", "0"], "at least one prompt token"),
        ([*SHAPE, "--methods", "none", "--max-tokens", "1020"], "more than the 1024"),
        ([*SHAPE, "--synthetic-acceptance", "2", "--drafter", "x"], "leave out targets, drafters"),
        (["--shape", "qwen3-8b", *RANDOM], "shape qwen3-8b needs a GPU, and torch sees none; on"),
        ([*SHAPE, "--methods", "none,ngram", *RANDOM], "random text repeats nothing"),
        ([*SHAPE, "--methods", "none,mtp", *RANDOM], "shape tiny has no head of its own"),
        (["--random-weights"], "need --shape"),
        (["--routing", "half"], "need --shape"),
        ([*SHAPE, "--methods", "none", "--routing", "same"], "routing same is not known"),
        (["--checkpoint", "x"], "need --shape"),
        ([*SHAPE, "--methods", "none", "--checkpoint", "x"], "is not a model directory"),
        (
            [*SHAPE, "--methods", "none", "--checkpoint", "x", "--routing", "half"],
            "--routing is made in a --checkpoint",
        ),
        (["--synthetic-acceptance", "2"], "need --shape"),
    ],
)
def test_what_does_not_fit_is_refused(peagle, monkeypatch, arguments, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("peagle.bench.synthetic.random_target", lambda *_: pytest.fail("it begins"))
    result = peagle("bench", *arguments)
    assert result.code == 2
    assert message in result.err
