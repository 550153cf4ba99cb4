"""Results as files, beside one another, and kept by the command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_result import RUN, SAID, result

import keep
from peagle.errors import InputError
from records.result import Result, Run
from records.store import index, problems, read, read_all, text_of, write

BENCH = {
    "environment": {
        "date": "2026-01-02T03:04:05+00:00",
        "cpu": "a processor",
        "cores": 2,
        "threads": 2,
        "python": "3.11",
        "versions": {"peagle": "1", "torch": "2"},
        "device": "cpu",
        "dtype": "float32",
    },
    "notes": ["a note"],
    "doubts": ["a doubt"],
    "runs": [
        {
            **RUN,
            "draft_length": "fixed",
            "temperature": 0.0,
            "request_rate": 0.0,
            "otps": 2.0,
            "acceptance_length": 2.5,
            "acceptance_rate_per_position": [0.9],
            "ttft_ms": {"p50": 1.0, "p95": 2.0, "p99": 3.0},
            "itl_ms": {"p50": 0.0, "p95": 0.0, "p99": 0.0},
            "e2e_ms": {"p50": 1.0, "p95": 2.0, "p99": 3.0},
            "output_tokens": 8,
            "same_text": None,
            "rounds": [1.0, 2.0, 3.0],
            "failed": 0,
        }
    ],
}


def test_a_file_has_a_line_for_each_run_and_is_read_as_it_was(tmp_path: Path):
    rows = [{"product": "down", "us": 1.5}, {"product": "head", "us": 2.5}]
    found = result(rows=rows, units={"us": "us"}, notes=("é",))
    write(found, tmp_path / "one.json")
    assert read(tmp_path / "one.json") == found
    lines = (tmp_path / "one.json").read_text().splitlines()
    assert '  {"product": "head", "us": 2.5}' in lines
    assert json.loads("\n".join(lines))["notes"] == ["é"]


def test_a_file_that_is_no_result_is_named(tmp_path: Path):
    (tmp_path / "wrong.json").write_text(json.dumps({**SAID, "runs": [{**RUN, "rounds": ["x"]}]}))
    with pytest.raises(InputError, match=r"wrong\.json: runs\.0\.rounds\.0: Input should be a val"):
        read_all(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "nothing.json")


def test_what_was_measured_again_has_to_be_marked():
    old, new = result(), result(date="2026-01-03")
    [problem] = problems({"old": old, "new": new})
    assert problem == "new and old measured the same; say which one is superseded"
    marked = old.model_copy(update={"superseded_by": "new"})
    assert not [*problems({"old": marked, "new": new})]
    assert [*problems({"old": marked})] == ["old is superseded by new, which is not there"]
    older = new.model_copy(update={"superseded_by": "old"})
    [wrong] = problems({"old": old, "new": older})
    assert wrong == "new is superseded by old, which is older or superseded itself"


@pytest.mark.parametrize(
    "change",
    [
        {"claim": "another"},
        {"machine": {"device": "a card"}},
        {"setting": {"dtype": "float32"}},
        {"runs": [Run(**{**RUN, "k": 3}, rounds=(1.0,)).model_dump()]},
    ],
)
def test_what_differs_stands_beside(change: dict[str, Any]):
    assert not [*problems({"one": result(), "other": result(**change)})]
    assert [*problems({"one": result(claim="unknown")})] == ["one has no claim"]


def test_the_index_names_every_result_the_newest_first():
    old = result(measured="The first").model_copy(update={"superseded_by": "new"})
    lines = index({"old": old, "new": result(date="2026-01-03")}).splitlines()[-2:]
    assert lines == [
        "| [new](new.json) | What was measured | unknown | 2026-01-03 | unknown |  |",
        "| [old](old.json) | The first | unknown | 2026-01-02 | unknown | [new](new.json) |",
    ]


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results with one in it."""
    place = tmp_path / "results"
    place.mkdir()
    write(result(machine={"device": "cpu"}, setting={"dtype": "float32"}), place / "old.json")
    monkeypatch.setattr(keep, "RESULTS", place)
    monkeypatch.setattr(keep, "read_all", lambda: read_all(place))
    return place


class TestKeep:
    def test_a_benchmark_s_file_becomes_a_result_that_replaces_another(
        self, house: Path, tmp_path: Path
    ):
        file = tmp_path / "bench.json"
        file.write_text(json.dumps(BENCH))
        asked = {"measured": "Again", "command": "peagle bench", "commit": "1234567"}
        with pytest.raises(InputError, match="new and old measured the same"):
            keep.main(file, "a-claim", "new", **asked)
        assert [path.name for path in house.iterdir()] == ["old.json"]
        keep.main(file, "a-claim", "new", **asked, supersedes=["old"])
        new = read(house / "new.json")
        assert read(house / "old.json").superseded_by == "new"
        assert (new.measured, new.command, new.commit) == ("Again", "peagle bench", "1234567")
        assert (new.notes, new.doubts) == (("a note",), ("a doubt",))
        assert new.machine.model_dump() == {
            "device": "cpu",
            "cpu": "a processor",
            "cores": 2,
            "threads": 2,
            "python": "3.11",
            "card": {},
        }
        [run] = new.runs
        assert (run.rounds, run.acceptance_length, run.itl_ms) == ((1.0, 2.0, 3.0), 2.5, None)

    def test_a_script_s_result_is_kept_under_a_claim(self, house: Path, tmp_path: Path):
        measured = Result(**{**SAID, "claim": "unknown"}, rows=({"us": 1.5},), units={"us": "us"})
        (tmp_path / "out.json").write_text(text_of(measured))
        keep.main(tmp_path / "out.json", "times", "times_1")
        assert read(house / "times_1.json").claim == "times"
        with pytest.raises(InputError, match="exists; give another name"):
            keep.main(tmp_path / "out.json", "times", "times_1")

    def test_what_cannot_be_kept_is_refused(self, house: Path, tmp_path: Path):
        file = tmp_path / "bench.json"
        with pytest.raises(InputError, match="cannot be read"):
            keep.main(file, "a-claim", "new")
        file.write_text(json.dumps(BENCH))
        with pytest.raises(InputError, match="say what was measured: --measured"):
            keep.main(file, "a-claim", "new")
        with pytest.raises(InputError, match="there is no result older"):
            keep.main(file, "a-claim", "new", measured="It", supersedes=["older"])


@pytest.mark.usefixtures("forked")
def test_each_result_is_drawn(tmp_path: Path):
    """One with speeds as a report with plots, one of rows as a table."""
    write(result(), tmp_path / "speeds.json")
    rows = ({"product": "down", "us": 1234.5}, {"product": "head", "us": 2.0})
    write(result(runs=(), rows=rows, units={"us": "us"}), tmp_path / "rows.json")
    files = [str(tmp_path / f"{name}.json") for name in ("speeds", "rows")]
    command = [sys.executable, str(Path(keep.__file__).with_name("draw.py")), *files]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    pages = [(tmp_path / "out" / name / "report.md").read_text() for name in ("speeds", "rows")]
    assert "| P-EAGLE, K = 7 | **1.0** |" in pages[0]
    assert "| commit | unknown |" in pages[0]
    assert "| product | us, us |\n| --- | --: |\n| down | 1,234 |" in pages[1]
    assert (tmp_path / "out" / "rows" / "figures.csv").read_text().splitlines()[1] == "down,1234.5"
