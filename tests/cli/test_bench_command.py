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
    "acceptance_length_interval",
    "tokens_per_cycle",
    "mean_step_ms",
    "acceptance_rate_per_position",
    "ttft_ms",
    "itl_ms",
    "e2e_ms",
    "output_tokens",
    "same_text",
    "rounds",
    "draft_length",
    "data",
    "temperature",
    "request_rate",
    "failed",
    "core_share",
}


@pytest.fixture
def bench(peagle, pair):
    def run(*arguments):
        models = ["--target", pair.target, "--eagle3", pair.eagle3, "--peagle", pair.peagle]
        size = ["--limit", 2, "--max-tokens", 8, "--rounds", 2]
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
    assert written["environment"]["prompts"] == {"bundled": 2}
    runs = written["runs"]
    methods = [("none", 0), *((m, k) for m in ("eagle3", "peagle") for k in (2, 3))]
    cases = [(run["method"], run["k"], run["concurrency"]) for run in runs]
    assert cases == [(*method, c) for c in (1, 2) for method in methods]
    for run in runs:
        assert run.keys() == RUN_KEYS
        assert run["same_text"] is True
        assert run["output_tokens"] == 16
        assert len(run["rounds"]) == 2
    assert [found["concurrency"] for found in written["verdicts"]] == [1, 2]
    for verdict in written["verdicts"]:
        assert len({verdict["first"], verdict["second"]} & {"none", "eagle3", "peagle"}) == 2
        assert verdict["ratio"] >= 1.0
        assert (verdict["clear"], verdict["interval"]) == (False, None)
    assert result.out.count("in too few rounds to say so") == 2
    assert "Medians of 2 rounds" in result.out
    assert bool(written["doubts"]) == ("Do not rely on these figures" in result.out)
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
    assert result.err.splitlines()[-1] == message
    assert result.err.count("round ") == 2
    assert any(line.split()[:1] == ["none"] for line in result.out.splitlines())
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


def test_drafts_may_be_looked_up(bench, tmp_path):
    out = tmp_path / "out.json"
    assert bench("--methods", "none,ngram,peagle", "--k", 4, "--json", out).code == 0
    results = json.loads(out.read_text())["runs"]
    assert [found["method"] for found in results] == ["none", "ngram", "peagle"]
    assert all(found["same_text"] is not False for found in results)


def test_a_lookup_alone_runs_beside_none(peagle, pair, tmp_path):
    asked = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    size = ["--limit", 1, "--max-tokens", 4, "--rounds", 1]
    result = peagle("bench", pair.target, "--speculative-config", asked, *size)
    assert result.code == 0
    assert "n-gram" in result.out


def test_a_targets_own_head_runs_beside_none(peagle, own_head, tmp_path):
    asked = '{"method": "mtp", "num_speculative_tokens": 2}'
    size = ["--limit", 1, "--max-tokens", 8, "--rounds", 1, "--json", tmp_path / "out.json"]
    assert peagle("bench", own_head, "--speculative-config", asked, *size).code == 0
    both = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(found["method"], found["k"]) for found in both] == [("none", 0), ("mtp", 2)]
    assert both[1]["same_text"] is not False


def test_given_acceptance_is_not_measured(peagle, pair):
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]}
    asked = json.dumps({"model": str(pair.peagle), "num_speculative_tokens": 1, **rates})
    result = peagle("bench", pair.target, "--speculative-config", asked)
    assert result.code == 2
    assert "leave out synthetic_acceptance_rates, or give --shape" in result.err


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
    assert run["same_text"] is None


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


def test_temperatures_prompts_and_natural_ends_are_part_of_the_grid(bench, tmp_path):
    (tmp_path / "own.txt").write_text("a = 1\nb = 2\n")
    sets = ["--prompts", "bundled", "--prompts", tmp_path / "own.txt"]
    how = ["--temperature", "0,0.8", "--top-p", "0.9", "--seed", 3, "--no-ignore-eos"]
    result = bench("--methods", "none,peagle", "--k", 2, *sets, *how, "--json", "-")
    written = json.loads(result.out)
    facts = written["environment"]
    assert facts["prompts"] == {"bundled": 2, "own": 2}
    assert (facts["sampling"], facts["ends"]) == ({"top_p": 0.9, "seed": 3}, "at the end of text")
    cases = [(run["data"], run["temperature"], run["method"]) for run in written["runs"]]
    loads = [(data, heat) for data in ("bundled", "own") for heat in (0.0, 0.8)]
    assert cases == [(*load, method) for load in loads for method in ("none", "peagle")]
    assert all(run["same_text"] for run in written["runs"])  # sampled ones too: one seed
    assert "2 in flight" not in result.err


@pytest.mark.parametrize("output", ["file", "stdout"])
def test_ctrl_c_keeps_what_was_measured(bench, tmp_path, monkeypatch, output):
    from peagle.bench.load import EngineCase

    original, runs = EngineCase.run, []

    def run(self, on_finish):
        runs.append(self.case)
        if len(runs) == 6:
            raise KeyboardInterrupt
        return original(self, on_finish)

    monkeypatch.setattr(EngineCase, "run", run)
    out = tmp_path / "out.json" if output == "file" else "-"
    report = tmp_path / "report"
    result = bench("--k", 2, "--json", out, "--report", report)
    assert result.code == 130
    assert result.err.splitlines()[-1] == "peagle: interrupted"
    written = json.loads(out.read_text() if output == "file" else result.out)
    assert [len(run["rounds"]) for run in written["runs"]] == [1, 2, 2]
    assert "speed-up" in (result.out if output == "file" else result.err)
    assert (report / "index.html").exists()


def test_rows_are_written_as_they_come(bench, tmp_path, monkeypatch):
    from peagle.bench.load import EngineCase

    original, seen = EngineCase.run, []
    out = tmp_path / "out.json"

    def run(self, on_finish):
        seen.append(len(json.loads(out.read_text())["runs"]) if out.exists() else 0)
        return original(self, on_finish)

    monkeypatch.setattr(EngineCase, "run", run)
    result = bench("--k", 2, "--json", out)
    assert seen == [0, 1, 2, 3, 3, 3]
    lines = [line for line in result.err.splitlines() if line.startswith("round ")]
    assert lines[0].startswith("round 1, no speculation, 1 in flight, bundled: ")
    assert lines[-1].startswith("round 2, no speculation, 1 in flight")


def test_a_case_that_fails_costs_no_other_and_is_told_at_the_end(bench, tmp_path, monkeypatch):
    from peagle.bench.load import EngineCase
    from peagle.errors import InputError

    original = EngineCase.run

    def run(self, on_finish):
        if self.case.method == "eagle3":
            raise InputError("out of memory")
        return original(self, on_finish)

    monkeypatch.setattr(EngineCase, "run", run)
    result = bench("--k", 2, "--rounds", 1, "--report", tmp_path / "report")
    assert result.code == 2
    complaint = "peagle: EAGLE-3, K = 2, 1 in flight, bundled: out of memory"
    assert result.err.splitlines()[-1] == complaint
    assert "P-EAGLE" in result.out
    told = "| EAGLE-3, K = 2, 1 in flight, bundled | out of memory |"
    assert told in (tmp_path / "report" / "report.md").read_text()


def test_a_report_is_written_beside_the_table(bench, tmp_path):
    place = tmp_path / "report"
    costs = ["--price-per-hour", "2.5", "--target-rate", 5000]
    result = bench("--k", 2, "--concurrency", "1,2", "--report", place, *costs)
    assert result.code == 0, result.err
    assert f"The report: {place}/index.html" in result.out
    page = (place / "index.html").read_text()
    assert "as give 5,000 tokens/s" in page
    assert "peagle" in (place / "report.md").read_text()
    assert (place / "figures.csv").read_text().startswith("method,k,concurrency")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--report", "{place}"], "exists; give another name, or --force to replace its files"),
        (["--report", "{place}/file/x"], "cannot be written: Not a directory"),
        (
            ["--report", "{place}/r", "--price-per-hour", "cheap"],
            "unable to parse string as a number",
        ),
        (["--report", "{place}/r", "--price-per-hour", "0"], "--price-per-hour: Input should be"),
        (["--report", "{place}/r", "--price-per-hour", "nan"], "Input should be a finite number"),
        (["--report", "{place}/r", "--target-rate", "-1"], "--target-rate: Input should"),
        (["--price-per-hour", "1"], "--price-per-hour is for the report; add --report DIR"),
        (["--rounds", "0"], "--rounds: Input should be greater than 0"),
        (["--report", "{place}/r", "--prompts", "{place}/absent.txt"], "absent.txt cannot be read"),
        (["--temperature", "warm"], "--temperature: Input should be a valid number"),
        (["--temperature", "-1"], "--temperature: "),
        (["--top-p", "2"], "--top-p: "),
        (["--draft-length", "short"], "--draft-length: "),
        (["--request-rate", "2"], "--request-rate needs --url"),
    ],
)
def test_what_cannot_be_is_refused_on_one_line(bench, tmp_path, monkeypatch, options, complaint):
    monkeypatch.setattr("peagle.bench.load.drive", lambda *_: pytest.fail("a run began"))
    (tmp_path / "file").write_text("")
    result = bench(*(option.format(place=tmp_path) for option in options))
    assert result.code == 2
    assert complaint in result.err
    assert len(result.err.splitlines()) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_drafts_that_branch_give_the_same_text(peagle, pair, tmp_path):
    config = json.dumps({"model": str(pair.peagle), "num_tree_nodes": 15})
    size = ["--limit", 1, "--max-tokens", 8, "--rounds", 1, "--json", tmp_path / "out.json"]
    result = peagle("bench", pair.target, "--speculative-config", config, *size)
    assert result.code == 0, result.err
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["method"], run["same_text"]) for run in runs] == [("none", True), ("peagle", True)]
    assert [run.get("branches", False) for run in runs] == [False, True]
    assert "Drafts branch: P-EAGLE, K = 8, 1 in flight." in result.out
