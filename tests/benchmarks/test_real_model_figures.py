"""README's figures of a real model are those of the kept reports."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "benchmarks" / "acceptance" / "results"
SMALLER, BRANCHING = "smollm2_2026-11-27", "smollm2_2026-11-27/branching"
LARGER = "smollm2_16m_2026-11-27"
PLAIN = str.maketrans({"*": None, "\u2013": "-", "\u00d7": "x"})
CASES = [("mt_bench", "0.0"), ("mt_bench", "1.0"), ("HumanEval", "0.0"), ("HumanEval", "1.0")]
README, PAGE = ("README.md", ", {}x"), ("docs/measure.md", "; {}")


@pytest.mark.parametrize(
    ("page", "between", "label", "method", "acceptance", "speed"),
    [
        (*README, "EAGLE-3", "eagle3", SMALLER, BRANCHING),
        (*README, "P-EAGLE", "peagle", BRANCHING, BRANCHING),
        (*PAGE, "EAGLE-3, 8M", "eagle3", SMALLER, BRANCHING),
        (*PAGE, "P-EAGLE, 8M", "peagle", BRANCHING, BRANCHING),
        (*PAGE, "without branches, 8M", "peagle", SMALLER, SMALLER),
        (*PAGE, "EAGLE-3, 16M", "eagle3", LARGER, LARGER),
    ],
)
def test_a_page_shows_acceptance_and_speed(
    page: str, between: str, label: str, method: str, acceptance: str, speed: str
):
    lengths, speeds = rows(acceptance, "acceptance", method), rows(speed, "speed", method)
    cells = [
        shown(lengths[case]) + between.format(f"{float(speeds[case]['speed_up']):.2f}")
        for case in CASES
    ]
    lines = (ROOT / page).read_text().translate(PLAIN).splitlines()
    assert f"| {label} | {' | '.join(cells)} |" in lines


def test_few_questions_show_what_branching_gives_with_more_data():
    speeds = rows(LARGER, "speed", "peagle")
    cells = [f"{shown(speeds[case])}; {float(speeds[case]['speed_up']):.2f}" for case in CASES]
    label = "P-EAGLE, 16M, the six questions of each"
    assert f"| {label} | {' | '.join(cells)} |" in (ROOT / PAGE[0]).read_text().splitlines()


def rows(place: str, report: str, method: str) -> dict[tuple[str, str], dict[str, str]]:
    """The figures of a method, by prompts and temperature."""
    found = csv.DictReader((REPORTS / place / report / "figures.csv").open())
    return {(row["data"], row["temperature"]): row for row in found if row["method"] == method}


def shown(row: dict[str, str]) -> str:
    """An acceptance length and its interval."""
    least, most = map(float, row["acceptance_length_interval"].split())
    return f"{float(row['acceptance_length']):.2f} ({least:.2f}-{most:.2f})"
