import json
import resource
import shutil
from unittest import mock

import pytest

from peagle.cli.options import use_threads

RUN_KEYS = {
    "method",
    "k",
    "concurrency",
    "otps",
    "acceptance_length",
    "acceptance_rate_per_position",
    "ttft_ms",
    "itl_ms",
    "e2e_ms",
    "output_tokens",
    "identical_to_none",
    "rounds",
}


@pytest.fixture
def bench(peagle, pair):
    def run(*arguments):
        models = ["--target", pair.target, "--eagle3", pair.eagle3, "--peagle", pair.peagle]
        size = ["--limit", 2, "--max-tokens", 8]
        return peagle("bench", *models, *size, *arguments)

    return run


@pytest.fixture
def limited_files():
    """Limits the bytes of every file, as if the disk were full; None takes the limit away."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        soft = before[0] if size is None else size
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield limit
    limit(None)


def test_the_result_file_and_the_table_hold_every_run(bench, tmp_path):
    out = tmp_path / "out.json"
    result = bench("--k", "2,3", "--concurrency", "1,2", "--json", out)
    assert result.code == 0
    written = json.loads(out.read_text())
    assert written["environment"]["prompts"] == 2
    runs = written["runs"]
    assert [(run["method"], run["k"], run["concurrency"]) for run in runs] == [
        ("none", 0, 1),
        ("none", 0, 2),
        *((m, k, c) for m in ("eagle3", "peagle") for k in (2, 3) for c in (1, 2)),
    ]
    for run in runs:
        assert run.keys() == RUN_KEYS
        assert run["identical_to_none"] is True
        assert run["output_tokens"] == 16
    rows = [line for line in result.out.splitlines() if line.strip().endswith("yes")]
    assert len(rows) == len(runs)
    assert list(tmp_path.iterdir()) == [out]


def test_a_full_disk_takes_the_result_file_but_not_the_table(bench, tmp_path, limited_files):
    out = tmp_path / "out.json"
    limited_files(100)
    result = bench("--methods", "none", "--json", out)
    limited_files(None)
    assert result.code == 2
    message = f"peagle: {out} cannot be written: File too large; the table holds what was measured"
    assert result.err.splitlines() == [message]
    assert result.out.splitlines()[-2].split()[0] == "none"
    assert list(tmp_path.iterdir()) == []


def test_the_result_goes_to_stdout_and_then_the_table_does_not(bench):
    result = bench("--k", 2, "--json", "-")
    assert [run["k"] for run in json.loads(result.out)["runs"]] == [0, 2, 2]
    assert "speed-up" in result.err


def test_a_result_is_replaced_when_asked(bench, tmp_path):
    out = tmp_path / "out.json"
    out.write_text("before")
    assert bench("--methods", "none", "--json", out, "--force").code == 0
    assert json.loads(out.read_text())["runs"]


def runs(result):
    assert result.code == 0, result.err
    found = json.loads(result.out)["runs"]
    return [(run["method"], run["k"]) for run in found]


def test_k_is_by_default_what_each_drafter_was_trained_for(bench, pair, tmp_path):
    other = shutil.copytree(pair.eagle3, tmp_path / "eagle3")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_speculative_tokens": 2}))
    found = runs(bench("--eagle3", other, "--json", "-"))
    assert found == [("none", 0), ("eagle3", 2), ("peagle", 8)]


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
@pytest.mark.parametrize("form", ["--drafter", "--speculative-config"])
def test_one_drafter_runs_beside_none_by_its_files_method(peagle, pair, method, form):
    drafter = str(getattr(pair, method))
    named = [drafter, "--k", 3]
    if form == "--speculative-config":
        named = [json.dumps({"model": drafter, "num_speculative_tokens": 3})]
    size = ["--limit", 1, "--max-tokens", 4]
    found = runs(peagle("bench", pair.target, form, *named, *size, "--json", "-"))
    assert found == [("none", 0), (method, 3)]


def test_a_target_without_a_drafter_runs_alone(peagle, pair):
    size = ["--limit", 1, "--max-tokens", 4, "--json", "-"]
    assert runs(peagle("bench", pair.target, *size)) == [("none", 0)]
    both = ["--eagle3", pair.eagle3, *size]
    assert runs(peagle("bench", pair.target, *both)) == [("none", 0), ("eagle3", 8)]


def test_chat_makes_a_users_turn_of_each_prompt(peagle, pair, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "peagle.models.chat_template.template_turns", lambda turns, _: seen.append(turns) or turns
    )
    (tmp_path / "prompts.txt").write_text("first\nsecond\n")
    size = ["--prompts", tmp_path / "prompts.txt", "--max-tokens", 4]
    result = peagle("bench", pair.target, "--chat", *size, "--json", "-")
    assert json.loads(result.out)["environment"]["chats"] == 2
    assert [turn["content"] for (turn,) in seen] == ["first", "second"]


def test_without_none_there_is_nothing_to_compare_with(bench, tmp_path):
    out = tmp_path / "out.json"
    assert bench("--methods", "peagle", "--k", "2", "--json", out).code == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["identical_to_none"] is None


def test_threads_are_set_and_recorded(bench, tmp_path):
    import torch

    before = torch.get_num_threads()
    out = tmp_path / "out.json"
    try:
        assert bench("--methods", "none", "--threads", 1, "--json", out).code == 0
    finally:
        torch.set_num_threads(before)
    assert json.loads(out.read_text())["environment"]["threads"] == 1


@pytest.mark.parametrize(("cores", "used"), [(1, 1), (2, 2), (7, 7), (8, 7), (16, 14), (64, 56)])
def test_some_of_many_cores_are_left_to_others(monkeypatch, cores: int, used: int):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with mock.patch("torch.get_num_threads", return_value=cores):
        with mock.patch("torch.set_num_threads") as chosen:
            use_threads(None)
        chosen.assert_called_once_with(used)
        monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
        with mock.patch("torch.set_num_threads") as chosen:
            use_threads(None)
        chosen.assert_called_once_with(cores)


def test_k_beyond_training_is_a_warning(bench):
    result = bench("--methods", "none,peagle", "--k", "9")
    assert result.code == 0
    assert "warning: K = 9 is beyond the 8 tokens" in result.err
