"""The soak fails for what it is there to find, and for nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

import soak


def seen(**changes: Any) -> soak.Seen:
    """Ten quiet windows, a minute each, with some changes to the last."""
    quiet = {"memory_MB": 500.0, "acceptance_length": 3.0, "preemptions": 1, "audited": 9}
    windows = [{"minute": float(n), "different": 0, **quiet} for n in range(1, 11)]
    windows[0]["memory_MB"] = 300.0  # it warms up
    windows[-1] |= changes
    return soak.Seen(calls=20, windows=windows)


def test_quiet_windows_are_right():
    total, problems = soak.judged(seen())
    assert problems == []
    assert total["growth"] == pytest.approx(0.0, abs=1e-6)
    assert (total["audited"], total["different"], total["calls"]) == (90, 0, 20)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"different": 1}, "1 audited answers differ"),
        ({"memory_MB": 540.0}, "memory grows by 4.29 MB a minute"),
        ({"acceptance_length": 2.8}, "the acceptance length fell from 3.0 to 2.8"),
    ],
)
def test_each_fault_is_told(changes: dict[str, Any], told: str):
    assert soak.judged(seen(**changes))[1] == [told]


def test_a_call_that_does_not_parse_is_told():
    found = seen()
    found.wrong_calls.append("{")
    assert soak.judged(found)[1] == ["calls do not parse: ['{']"]


@pytest.mark.slow
def test_a_short_one(tmp_path: Path, forked: None):
    """Against a server of its own, audited."""
    out = tmp_path / "soak.json"
    with pytest.raises(typer.Exit) as end:
        soak.main(minutes=0.01, jobs=8, out=out)
    told = json.loads(out.read_text())
    assert end.value.exit_code == 0, told
    rows = {row["kind"]: row for row in told["rows"]}
    assert rows["window"]["audited"] > 0
    assert rows["all"]["calls"] > 0
