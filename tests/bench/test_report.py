import dataclasses
import io
import json
import math

from rich.console import Console

from peagle.bench.load import Case, PromptWorkload, Run
from peagle.bench.measures import Measures, Percentiles
from peagle.bench.pair import Pair
from peagle.bench.prompts import Prompt
from peagle.bench.report import (
    environment,
    full_table,
    result_file,
    summary_table,
    verdict_sentence,
)
from peagle.bench.verdict import Ratio, Verdict, speed_up

TIMES = Percentiles(10.0, 20.0, 30.0)


def run(method, k, concurrency, otps, identical=True):
    found = Measures(otps, 2.5, (0.9, 0.6)[:k], TIMES, TIMES, TIMES, 128)
    return Run(Case(method, k, concurrency), found, ((1, 2),), identical, rounds=(otps,))


RUNS = [
    run("none", 0, 1, 100.0),
    run("none", 0, 4, 300.0),
    run("peagle", 2, 1, 250.0),
    run("peagle", 2, 4, 450.0, identical=False),
]


def printed(table, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_speed_is_compared_at_the_same_concurrency():
    assert [speed_up(run, RUNS).median for run in RUNS] == [1.0, 1.0, 2.5, 1.5]
    assert speed_up(RUNS[3], [RUNS[0], RUNS[3]]) is None


def test_tables_are_plain_text_within_80_columns():
    text = printed(full_table(RUNS))
    assert "\x1b" not in text
    assert "…" not in text
    row = next(line for line in text.splitlines() if "450.0" in line).split()
    assert row == ["P-EAGLE", "4", "2", "450.0", "1.50x", "2.50", "10.0", "10.0", "10.0", "no"]


ROUNDS = [
    dataclasses.replace(RUNS[0], rounds=(100.0,) * 6),
    dataclasses.replace(RUNS[2], rounds=(240.0, 250.0, 250.0, 250.0, 260.0, 260.0)),
]


def test_the_summary_has_a_row_a_method_with_the_interval_of_its_speed_up():
    table = summary_table(ROUNDS)
    lines = printed(table, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    rows = [line.split() for line in lines]
    assert ["none", "-", "100.0", "1.00x", "2.50", "yes"] in rows
    assert ["P-EAGLE", "2", "250.0", "2.50x", "(2.40-2.60)", "2.50", "yes"] in rows


def test_a_summary_of_few_rounds_has_no_interval():
    rows = [line.split() for line in printed(summary_table(RUNS[::2])).splitlines()]
    assert ["P-EAGLE", "2", "250.0", "2.50x", "2.50", "yes"] in rows
    unknown = [dataclasses.replace(RUNS[2], identical_to_none=None)]
    assert printed(summary_table(unknown)).split()[-6:] == [
        "P-EAGLE",
        "2",
        "250.0",
        "-",
        "2.50",
        "-",
    ]


def test_the_sentence_names_the_fastest_only_where_it_is_clear():
    none, peagle = ROUNDS
    clear = Verdict(peagle, none, Ratio(2.5, 2.4, 2.6))
    assert verdict_sentence(clear) == (
        "Fastest on this machine: P-EAGLE, 2.50 times as fast as no speculation (2.40-2.60)."
    )
    assert verdict_sentence(Verdict(peagle, none, Ratio(1.03, 0.98, 1.09))) == (
        "No clear winner on this machine: P-EAGLE was 1.03 times as fast as no speculation "
        "(0.98-1.09)."
    )
    assert verdict_sentence(Verdict(peagle, none, Ratio(2.5, 0.0, math.inf))) == (
        "No clear winner on this machine: P-EAGLE was 2.50 times as fast as no speculation, "
        "in too few rounds to say so."
    )


def test_the_result_file_has_the_environment_and_the_runs(tmp_path):
    workload = PromptWorkload(
        Pair("target", {"peagle": "drafter"}), (Prompt("x"),), 8, "bfloat16", "cpu"
    )
    facts = environment(workload)
    assert (facts["dtype"], facts["device"], facts["max_tokens"]) == ("bfloat16", "cpu", 8)
    assert facts["cpu"]
    assert facts["sampling"] == "greedy, end of text ignored"
    ending = dataclasses.replace(workload, prompts=(Prompt("x", stop=("\n",)),))
    assert "to the end that prompts say" in environment(ending)["sampling"]
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
