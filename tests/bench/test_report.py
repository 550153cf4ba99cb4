import dataclasses
import io
import json

from rich.console import Console

from peagle.bench.load import Case, PromptWorkload, Run
from peagle.bench.measures import Measures, Percentiles
from peagle.bench.pair import Pair
from peagle.bench.prompts import Prompt
from peagle.bench.report import (
    environment,
    full_table,
    result_file,
    speed_up,
    summary_table,
)

TIMES = Percentiles(10.0, 20.0, 30.0)


def run(method, k, concurrency, otps, identical=True):
    found = Measures(otps, 2.5, (0.9, 0.6)[:k], TIMES, TIMES, TIMES, 128)
    return Run(Case(method, k, concurrency), found, ((1, 2),), identical)


RUNS = [
    run("none", 0, 1, 100.0),
    run("none", 0, 4, 300.0),
    run("peagle", 2, 1, 250.0),
    run("peagle", 2, 4, 450.0, identical=False),
]


def printed(table):
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()


def test_speed_is_compared_at_the_same_concurrency():
    assert [speed_up(run, RUNS) for run in RUNS] == [1.0, 1.0, 2.5, 1.5]
    assert speed_up(RUNS[3], [RUNS[0], RUNS[3]]) is None


def test_tables_are_plain_text_within_80_columns():
    text = printed(full_table(RUNS))
    assert "\x1b" not in text
    assert "…" not in text
    row = next(line for line in text.splitlines() if "450.0" in line).split()
    assert row == ["P-EAGLE", "4", "2", "450.0", "1.50x", "2.50", "10.0", "10.0", "10.0", "no"]


def test_the_summary_has_a_row_a_method():
    unknown = [dataclasses.replace(RUNS[2], identical_to_none=None)]
    assert printed(summary_table(RUNS[:1])).split()[-6:] == [
        "none",
        "-",
        "100.0",
        "1.00x",
        "2.50",
        "yes",
    ]
    assert printed(summary_table(unknown)).split()[-6:] == [
        "P-EAGLE",
        "2",
        "250.0",
        "-",
        "2.50",
        "-",
    ]


def test_the_result_file_has_the_environment_and_the_runs(tmp_path):
    workload = PromptWorkload(
        Pair("target", {"peagle": "drafter"}), (Prompt("x"),), 8, "bfloat16", "cpu"
    )
    facts = environment(workload)
    assert (facts["dtype"], facts["device"], facts["max_tokens"]) == ("bfloat16", "cpu", 8)
    assert facts["cpu"]
    assert facts["versions"].keys() == {"peagle", "torch", "transformers"}
    with result_file(tmp_path / "out.json") as write:
        write({"environment": facts, "runs": [run.as_json() for run in RUNS]})
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["environment"] == json.loads(json.dumps(facts))
    assert [entry["otps"] for entry in result["runs"]] == [100.0, 300.0, 250.0, 450.0]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with result_file(None) as write:
        write({"runs": []})
    assert not any(tmp_path.iterdir())
