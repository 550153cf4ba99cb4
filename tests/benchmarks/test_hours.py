"""The table of GPU-hours in the docs is what the script counts."""

from pathlib import Path

import pytest

import hours

PAGE = Path(__file__).parents[2] / "docs" / "first-drafter.md"


def test_the_page_has_every_line_that_the_script_prints(capsys: pytest.CaptureFixture[str]):
    hours.main(hours.TFLOPS)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(hours.CASES)
    assert "\n".join(printed) in PAGE.read_text()


def test_hours_follow_the_rate():
    case = hours.CASES[0]
    fast, slow = (case.row(rate).split(" | ") for rate in (4e14, 1e14))
    assert float(slow[3]) == pytest.approx(4 * float(fast[3]), rel=0.01)
    assert fast[4:] == slow[4:]


def test_a_drafter_for_gpt_oss_has_the_size_of_the_published_one():
    """1.8 billion parameters, by the card of amazon/GPT-OSS-20B-P-EAGLE."""
    [case] = (case for case in hours.CASES if case.name == "GPT-OSS-20B")
    assert case.row(1e14).split(" | ")[1] == "1.8 G"
