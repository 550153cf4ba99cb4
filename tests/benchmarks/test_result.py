"""What a result must say, and what it may leave unknown."""

from typing import Any

import pytest
from pydantic import ValidationError

from records.result import UNKNOWN, Percentiles, Result, Run

RUN: dict[str, Any] = {"data": "HumanEval", "method": "peagle", "k": 7, "concurrency": 1}
SAID: dict[str, Any] = {
    "measured": "What was measured",
    "claim": "a-claim",
    "date": "2026-01-02T03:04:05+00:00",
    "versions": {"peagle": {"peagle": "1"}},
}


def result(**more: Any) -> Result:
    return Result(**{**SAID, "runs": [Run(**RUN, rounds=(2.0, 1.0))], **more})


def test_what_an_old_record_lacks_is_unknown():
    found = result()
    assert (found.command, found.commit, found.machine.cpu) == (UNKNOWN,) * 3
    assert found.machine.cores == UNKNOWN
    assert found.day == "2026-01-02"


def test_the_slower_of_two_rounds_in_the_middle_is_the_median():
    assert [Run(**RUN, rounds=rounds).speed for rounds in ((2.0, 1.0), (3.0, 9.0, 1.0))] == [1, 3]
    assert Run(**RUN).speed is None


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"runs": ()}, "holds no figure"),
        ({"claim": "A claim"}, "claim"),
        ({"commit": "main"}, "commit"),
        ({"date": "yesterday"}, "date"),
        ({"versions": {}}, "versions of peagle are missing; write unknown"),
        ({"something": 1}, "something"),
        ({"rows": [{"us": 1.5}]}, "us has no unit"),
        ({"rows": [{"product": "down", "us": 1.5}], "units": {"us": "us", "W": "W"}}, "no row has"),
        ({"runs": [Run(**RUN).model_copy(update={"rounds": (0.0,)})]}, "greater than 0"),
    ],
)
def test_what_is_no_result_is_refused(more: dict[str, Any], why: str):
    with pytest.raises(ValidationError, match=why):
        result(**{name: _plain(value) for name, value in more.items()})


def _plain(value: Any) -> Any:
    """Runs as a file holds them, which is checked again."""
    runs = isinstance(value, list) and all(isinstance(one, Run) for one in value)
    return [one.model_dump() for one in value] if runs else value


def test_a_row_is_known_by_what_has_no_unit():
    row = {"product": "down", "rows": 512, "us": 1.5}
    found = result(rows=[row], units={"us": "us"})
    assert found.row_case(found.rows[0]) == (("product", "down"), ("rows", 512))


def test_a_case_is_told_by_everything_that_changes_a_speed():
    run = Run(**RUN, ttft_ms=Percentiles(p50=1, p95=2, p99=3))
    changes = {
        "side": "vllm",
        "setting": "eager",
        "data": "MT-Bench",
        "method": "eagle3",
        "k": 3,
        "draft_length": "auto",
        "given_acceptance": 2.0,
        "concurrency": 8,
        "request_rate": 1.0,
        "temperature": 1.0,
        "branches": True,
    }
    cases = {run.case, *(run.model_copy(update={k: v}).case for k, v in changes.items())}
    assert len(cases) == 1 + len(changes)
    assert run.model_copy(update={"rounds": (1.0,)}).case == run.case
