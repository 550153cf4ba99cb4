import contextlib
import dataclasses
import io
import json
import os

import pytest
from rich.console import Console

from peagle.bench.load import Case, PromptWorkload, Run
from peagle.bench.measures import Measures, Percentiles
from peagle.bench.pair import Pair
from peagle.bench.prompts import Prompt
from peagle.bench.report import (
    environment,
    full_table,
    speed_up,
    summary_table,
    whole_file,
    write_result,
)
from peagle.errors import InputError

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
    with whole_file(tmp_path / "out.json") as file:
        write_result(file, facts, RUNS)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["environment"] == json.loads(json.dumps(facts))
    assert [entry["otps"] for entry in result["runs"]] == [100.0, 300.0, 250.0, 450.0]


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out.json"
    with whole_file(out) as file:
        file.write("first")
        file.flush()
        assert not out.exists()
    assert out.read_text() == "first"
    with contextlib.suppress(KeyboardInterrupt), whole_file(out) as file:
        file.write("second")
        raise KeyboardInterrupt
    assert out.read_text() == "first"
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("name", ["absent/out.json", "folder", "file/out.json", "n" * 300])
def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written"), whole_file(tmp_path / name):
        pytest.fail("the block began")


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real.json")
    with whole_file(tmp_path / "link") as file:
        file.write("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real.json").read_text() == "x"
