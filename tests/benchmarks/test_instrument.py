"""The check of `peagle bench` as an instrument, on a few tokens and a difference nobody misses."""

from pathlib import Path

import pytest
import typer

import instrument
from records.store import read

KEPT = Path(instrument.__file__).parent / "results" / "instrument_2026-11-27.json"


def row(kind: str, first: str, clear: bool = True, doubts: tuple[str, ...] = ()) -> instrument.Row:
    """What a run said."""
    said = {"verdict": f"{first} is the fastest.", "first": first, "clear": clear}
    return {"kind": kind, **said, "doubts": "; ".join(doubts) or None}


GOOD = [
    row("equal", "peagle"),
    row("equal", "eagle3", clear=False),
    row("planted", "plain"),
    row("busy", "peagle", doubts=("the machine was busy",)),
]


@pytest.mark.nightly
@pytest.mark.usefixtures("forked")
def test_every_kind_of_run_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = ["--limit", "1", "--max-tokens", "8", "--rounds", "3"]
    equal, planted, busy = instrument.measured(1, 10.0, flags)
    assert [found["kind"] for found in (equal, planted, busy)] == ["equal", "planted", "busy"]
    assert (planted["first"], planted["second"]) == ("plain", "slower")
    assert planted["ratio"] > 1.5
    assert {busy["first"], equal["first"]} <= {"none", "eagle3", "peagle"}


@pytest.mark.parametrize(
    ("more", "failures"),
    [
        ([], []),
        ([row("equal", "eagle3")], ["equal runs named different winners: eagle3, peagle"]),
        (
            [row("planted", "plain", clear=False), row("planted", "slower")],
            ["the planted difference was missed in 2 of 3 runs"],
        ),
        ([row("busy", "peagle")], ["the run beside a busy process did not say so"]),
    ],
)
def test_rows_are_written_and_failures_told(monkeypatch, capsys, tmp_path, more, failures):
    monkeypatch.setattr(instrument, "measured", lambda *_: iter([*GOOD, *more]))
    out = tmp_path / "found.json"
    with pytest.raises(typer.Exit) as ended:
        instrument.main(out=out)
    assert ended.value.exit_code == bool(failures)
    numbered = [{"run": n, **row} for n, row in enumerate([*GOOD, *more], start=1)]
    assert [*read(out).rows] == numbered
    told = capsys.readouterr().out.splitlines()
    assert told[3] == "busy: peagle is the fastest. Doubted: the machine was busy."
    assert told[4 + len(more) :] == failures


def test_nothing_failed_in_the_kept_record():
    rows = read(KEPT).rows
    assert [row["kind"] for row in rows] == ["equal"] * 6 + ["planted"] * 6 + ["busy"]
    assert not list(instrument.wrong(rows))
