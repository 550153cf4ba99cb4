"""The soak fails for what it is there to find, and for nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

import soak
from peagle.errors import InputError
from records.result import Result

LINES = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11, 12], [13]]


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
    assert total["preemptions"] == 10
    assert "card_growth" not in total, "there is no card"
    assert soak.notes(total) == []


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


@pytest.mark.parametrize(("last", "told"), [(3.0, False), (2.7, True)])
def test_one_window_of_many_may_have_fewer_drafts_accepted(last: float, told: bool):
    """The last tenth is judged by its mean."""
    found = seen(acceptance_length=2.75)
    found.before, found.gap = seen().windows, 10.0
    found.windows[-2]["acceptance_length"] = last
    fell = [one for one in soak.judged(found)[1] if one.startswith("the acceptance length fell")]
    assert bool(fell) == told


def test_a_call_that_does_not_parse_is_told():
    found = seen()
    found.wrong_calls.append("{")
    assert soak.judged(found)[1] == ["calls do not parse: ['{']"]


def test_a_card_whose_memory_grows_is_told():
    found = seen()
    for window in found.windows:
        window["card_MB"] = 90_000 + 2 * window["minute"]
    total, problems = soak.judged(found)
    assert total["card_growth"] == 2.0
    assert problems == ["the card's memory grows by 2.00 MB a minute"]


def test_what_was_not_looked_at_is_told_and_no_fault():
    found = seen()
    found.calls = 0
    for window in found.windows:
        window["audited"] = 0
    total, problems = soak.judged(found)
    assert problems == []
    told = [row["told"] for row in soak.notes(total)]
    assert told == ["no answer was audited", "no call was forced by a grammar"]


def earlier(**setting: Any) -> Result:
    """Ten quiet windows of a run an hour before."""
    rows = tuple({"kind": "window", **window} for window in seen(acceptance_length=2.9).windows)
    units = {name: "?" for name in rows[0] if name != "kind"}
    told = {"measured": "it", "date": "2026-11-29T01:00:00+00:00", "units": units, "rows": rows}
    return Result(**told, versions={"peagle": {}}, setting=setting)


def test_an_earlier_run_is_the_beginning():
    setting = {"jobs": 48, "longest": 0}
    found = soak.continued(earlier(jobs=48), "2026-11-29T02:00:00+00:00", setting)
    found.windows = [
        {**one, "memory_MB": 740.0, "acceptance_length": 2.8} for one in seen().windows
    ]
    total, problems = soak.judged(found)
    assert [one["minute"] for one in found.all_windows[9:11]] == [10.0, 61.0]
    assert total["audited"] == 90, "those of this run"
    # all of the earlier run is in the first third of 70 minutes, and this run alone is level
    assert total["growth"] == pytest.approx(0.0, abs=1e-6)
    assert problems == ["the acceptance length fell from 3.0 to 2.8"]


def test_an_earlier_run_of_other_requests_is_refused():
    with pytest.raises(InputError, match="other longest"):
        soak.continued(earlier(), "2026-11-29T02:00:00+00:00", {"longest": 9})


def test_every_fourth_text_is_long_and_another():
    jobs = soak.lengthened(soak._jobs(48), LINES, 4000, 5000)
    long = [job["prompt"] for job in jobs if isinstance(job.get("prompt"), list)]
    [above] = [prompt for prompt in long if len(prompt) == 5001]
    own = [prompt for prompt in long if prompt is not above]
    assert len(own[0]) == 4000
    assert all(soak.SHORT <= len(prompt) <= 4000 for prompt in own)
    texts = [job for job in soak._jobs(48) if "prompt" in job]
    assert len(own) == -(-len(texts) // soak.EACH)
    assert len({tuple(prompt[:16]) for prompt in own}) == len(own)
    assert jobs == soak.lengthened(soak._jobs(48), LINES, 4000, 5000), "window after window"


def test_only_long_prompts_are_kept_from_the_prefix_cache():
    jobs = soak.lengthened(soak._jobs(8), LINES, 300, 400)
    for job in soak.salted(jobs, "3"):
        assert job.get("cache_salt") == ("3" if isinstance(job.get("prompt"), list) else None)


def test_without_calls_there_are_none():
    assert not [job for job in soak._jobs(48, calls=False) if "tools" in job]


@pytest.mark.slow
def test_a_short_one(tmp_path: Path, forked: None):
    """Against a server of its own, audited."""
    out = tmp_path / "soak.json"
    with pytest.raises(typer.Exit) as end:
        soak.main(minutes=0.01, jobs=8, longest=300, out=out)
    told = json.loads(out.read_text())
    assert end.value.exit_code == 0, told
    rows = {row["kind"]: row for row in told["rows"]}
    assert rows["window"]["audited"] > 0
    assert rows["all"]["calls"] > 0
    assert rows["all"]["refused"] == 1
