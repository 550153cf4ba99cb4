"""README's figures of a real model are those of the kept reports."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "benchmarks" / "acceptance" / "results" / "smollm2_2026-11-27"
PLAIN = str.maketrans({"*": None, "\u2013": "-", "\u00d7": "x"})
NAMES = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
CASES = [("mt_bench", "0.0"), ("mt_bench", "1.0"), ("HumanEval", "0.0"), ("HumanEval", "1.0")]


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize(("page", "between"), [("README.md", ", {}x"), ("docs/measure.md", "; {}")])
def test_a_page_shows_acceptance_and_speed(page: str, between: str, method: str):
    acceptance, speed = (rows(report, method) for report in ("acceptance", "speed"))
    cells = [
        shown(acceptance[case]) + between.format(f"{float(speed[case]['speed_up']):.2f}")
        for case in CASES
    ]
    lines = (ROOT / page).read_text().translate(PLAIN).splitlines()
    assert f"| {NAMES[method]} | {' | '.join(cells)} |" in lines


def rows(report: str, method: str) -> dict[tuple[str, str], dict[str, str]]:
    """The figures of a method, by prompts and temperature."""
    found = csv.DictReader((REPORTS / report / "figures.csv").open())
    return {(row["data"], row["temperature"]): row for row in found if row["method"] == method}


def shown(row: dict[str, str]) -> str:
    """An acceptance length and its interval."""
    least, most = map(float, row["acceptance_length_interval"].split())
    return f"{float(row['acceptance_length']):.2f} ({least:.2f}-{most:.2f})"
