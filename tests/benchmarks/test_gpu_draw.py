"""Reports of what the scripts and `peagle bench` keep, with made-up figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from draw import APART, LISTS, drawn
from listed import Listed
from told import SYNTHETIC, Told

from peagle.errors import InputError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "draw.py"
MACHINE = {"date": "2026-01-02T03:04:05", "cpu": "a processor", "device": "a card"}


def entry(method: str, k: int | None, otps: float, data: str = "bundled") -> dict:
    """A run as `peagle bench --json` has it."""
    times = {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    case = {"method": method, "k": k, "concurrency": 8, "draft_length": "fixed", "data": data}
    measures = {"otps": otps, "acceptance_length": 2.0, "acceptance_rate_per_position": [0.9, 0.1]}
    measures |= {"ttft_ms": times, "itl_ms": times, "e2e_ms": times, "output_tokens": 64}
    return {
        **case,
        **measures,
        "same_text": None,
        "rounds": [otps - 1, otps, otps + 1],
        "failed": 0,
    }


def bench(*entries: dict, **facts: object) -> dict:
    return {"environment": MACHINE | facts, "notes": ["a note"], "runs": list(entries)}


def mixed(method: str, k: int, **sides: dict) -> dict:
    mix = {"requests": 4, "in_flight": 2, "prompt_tokens": [30, 300], "output_tokens": [20, 100]}
    match = {"shape": "a-size", "method": method, "k": k, "acceptance_length": 3.0}
    return MACHINE | {"dtype": "bfloat16", "match": match, "mix": {**mix, "rounds": 3}} | sides


def told(*pieces: dict) -> Told:
    found = drawn(pieces)
    assert isinstance(found, Told)
    return found


def speeds(found: Told) -> dict[tuple[str, str], float]:
    return {(run.case.data, run.case.label): run.measures.otps for run in found.runs}


SHAPED = {"shape": "a-size", "synthetic": "SYNTHETIC: a-size", "acceptance_length": 2.0}


def test_a_made_model_s_shape_stands_in_the_place_of_its_prompts():
    runs = entry("none", 0, 100.0), entry("peagle", 2, 150.0)
    found = told(
        bench(*runs, **SHAPED),
        bench(entry("none", 0, 100.0, "a-size"), **SHAPED, batch_invariant=True),
    )
    assert speeds(found) == {
        ("a-size", "no speculation"): 100.0,
        ("a-size", "P-EAGLE, K = 2"): 150.0,
        ("a-size, batch-invariant", "no speculation"): 100.0,
    }
    assert speeds(told(bench(runs[0]))) == {("bundled", "no speculation"): 100.0}


def test_one_file_is_told_as_its_command_told_it():
    found = told(bench(entry("none", 0, 100.0), **SHAPED))
    assert found.environment == MACHINE | SHAPED
    assert found.notes == ["a note"]


def test_of_several_files_the_facts_are_all_of_theirs_and_later_figures_count():
    other = SHAPED | {"synthetic": "SYNTHETIC: another", "acceptance_length": 3.0, "cpu": "another"}
    first = bench(entry("none", 0, 100.0), entry("peagle", 2, 150.0), **SHAPED)
    later = bench(entry("peagle", 2, 160.0), **other)
    found = told(first, later)
    assert found.environment["date"] == "2026-01-02"
    assert found.environment["synthetic"] == SYNTHETIC
    assert found.environment["cpu"] == "a processor, another"
    assert found.environment["acceptance_length"] == "2.0, 3.0"
    assert found.notes == ["a note", APART]
    assert list(speeds(found).values()) == [100.0, 160.0]


def test_servers_are_told_with_what_ran_them():
    about = MACHINE | {"card": {"name": "a card"}, "memory": 0.4, "speculation": ""}
    processes = {"ours": {"microseconds_per_token": 50.0}}
    runs = entry("ours", None, 100.0, "prompts"), entry("theirs", None, 50.0, "prompts")
    found = told(bench(*runs), about | {"servers": processes})
    assert found.environment["processes"] == processes
    assert found.environment["share of memory of each"] == 0.4
    assert list(speeds(found)) == [("prompts", "ours"), ("prompts", "theirs")]


def test_lists_of_random_lengths_are_rounds_on_both_sides():
    sides = {
        "fixed": {"otps": [90.0, 100.0, 110.0], "ttft_ms": [5.0, 6.0, 7.0]},
        "auto": {"otps": [120.0, 110.0, 130.0], "ttft_ms": [3.0, 4.0, 5.0]},
        "vllm": {"captured": 896, "otps": [70.0, 80.0, 90.0]},
    }
    none = mixed("none", 0, fixed={"otps": [50.0, 60.0, 70.0], "ttft_ms": [1.0, 2.0, 3.0]})
    found = told(none, mixed("peagle", 7, **sides))
    assert speeds(found) == {
        ("a-size", "peagle: no speculation"): 60.0,
        ("a-size", "peagle: P-EAGLE, AL 3, K = 7"): 100.0,
        ("a-size", "peagle: P-EAGLE, AL 3, K ≤ 7"): 120.0,
        ("a-size", "vLLM, graphs to 896 rows: P-EAGLE, AL 3, K = 7"): 80.0,
    }
    assert found.notes == [LISTS]
    assert found.environment["prompt_tokens"] == "median 30, most 300"
    firsts = found.environment["median TTFT of each list, ms"]
    assert firsts["peagle: P-EAGLE, AL 3, K ≤ 7"] == "3.0, 4.0, 5.0"


def rows(*found: dict) -> dict:
    return MACHINE | {"shape": "a-size", "method": "peagle", "rows": list(found)}


def test_rows_are_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = {"requests": 8, "way": "bias", "tokens_per_second": 1234.5, "rounds": [1.0, 2.5]}
    found = drawn([rows(first)])
    assert isinstance(found, Listed)
    found.write(tmp_path / "report")
    page = (tmp_path / "report" / "report.md").read_text()
    assert page.startswith(f"# a-size, P-EAGLE, measured 2026-01-02\n\n**{SYNTHETIC}**")
    assert "| requests | way | tokens per second | rounds |\n| --- | --- | --: | --: |" in page
    assert "| 8 | bias | 1,234.5 | 1.0, 2.5 |" in page
    figures = (tmp_path / "report" / "figures.csv").read_text()
    assert figures == "requests,way,tokens_per_second,rounds\n8,bias,1234.5,1 2.5\n"
    found.show()
    assert json.loads(capsys.readouterr().out) == first


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([{"something": 1}], "of such results there is no report"),
        ([{"servers": {}}], "of such results there is no report"),
        ([rows(), bench()], "results of different kinds, runs and rows, make no report"),
    ],
)
def test_what_makes_no_report_is_refused(pieces: list[dict], why: str):
    with pytest.raises(InputError, match=why):
        drawn(pieces)


@pytest.mark.usefixtures("forked")
def test_the_command_writes_a_report_that_names_it(tmp_path: Path):
    file, out = tmp_path / "result.json", tmp_path / "a" / "report"
    file.write_text(json.dumps(bench(entry("none", 0, 100.0))))
    command = [sys.executable, str(SCRIPT), str(file), "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "100.0" in done.stdout
    page = (out / "report.md").read_text().replace("\\", "")
    assert f"Made by: python {SCRIPT} {file} --out {out}" in page
