"""The pages' figures are those of the reports, and these are of the kept results."""

import csv
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from draw import drawn
from records import compared, read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "gpu" / "results"
REPORTS = sorted(path.parent for path in RESULTS.rglob("report.md"))
AGAINST_VLLM = [
    RESULTS / f"{name}_2026-11-{day}"
    for name, day in (
        *(("comparison", 25), ("packed", 27), ("qwen3-30b-a3b-fp8", 27)),
        *(("gpt-oss-20b", 27), ("gpt-oss-120b", 27)),
    )
]
RECORDS = [path for path in sorted(RESULTS.glob("*.json")) if '"records"' in path.read_text()]
PLAIN = str.maketrans({"*": None, "\u2013": "-", "\u00d7": "x"})
README = (ROOT / "README.md").read_text().translate(PLAIN)
SHOWN = {
    ("qwen3-8b", "none"): ["fixed"],
    ("qwen3-8b", "EAGLE-3, AL 2.6"): ["fixed"],
    ("qwen3-8b", "P-EAGLE, AL 3.94"): ["fixed", "auto"],
    ("qwen3-30b-a3b", "P-EAGLE, AL 3.94"): ["fixed"],
    ("gpt-oss-20b", "none"): ["fixed"],
    ("gpt-oss-20b", "P-EAGLE, AL 3.94"): ["auto"],
    ("gpt-oss-120b", "P-EAGLE, AL 3.15"): ["auto"],
    ("qwen3-8b-fp8", "P-EAGLE, AL 3.94"): ["auto"],
    ("qwen3-30b-a3b-fp8", "P-EAGLE, AL 3.94"): ["auto"],
}
"""With more than one request, what README shows of a shape and method: K fixed, or by load."""


def shown() -> Iterator[str]:
    for report in AGAINST_VLLM:
        for row in csv.DictReader((report / "figures.csv").open()):
            modes = SHOWN.get((row["data"], row["method"]), [])
            modes = modes if row["concurrency"] != "1" else modes and ["fixed"]
            if row["engine"] == "peagle" and row["draft_length"] in modes:
                yield figure(row)


def figure(row: dict[str, str]) -> str:
    """As README's tables say it."""
    rounds = [float(speed) for speed in row["rounds"].split()]
    times = f", {float(row['speed_up']):.2f}x" if row["speed_up"] else ""
    return f"{float(row['otps']):,.0f} ({min(rounds):,.0f}-{max(rounds):,.0f}){times}"


@pytest.mark.parametrize("figure", list(shown()))
def test_readme_shows_the_median_its_spread_and_its_ratio(figure: str):
    assert re.search(rf"\| {re.escape(figure)}( \||, vLLM not done)", README)


def test_readme_shows_where_eagle3_wins():
    [run] = read(RESULTS / "eagle3_by_load_2026-11-24.json")["runs"]
    rounds = run["rounds"]
    shown = f"{statistics.median(rounds):,.0f} ({min(rounds):,.0f}-{max(rounds):,.0f})"
    assert f"| {shown}, vLLM not run |" in README


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_the_command_that_a_report_names_draws_it(report: Path):
    page = (report / "report.md").read_text().replace("\\", "")
    [command] = re.findall(r"Made by: python benchmarks/gpu/draw.py (.+) --out (.+)", page)
    files, out = command
    assert ROOT / out == report
    found = drawn([read(ROOT / file) for file in files.split()])
    assert found.figures == (report / "figures.csv").read_text()


@pytest.mark.parametrize("file", RECORDS, ids=lambda path: path.name)
def test_all_kept_records_make_a_report(file: Path):
    told = compared(read(file))
    assert told.environment["date"].startswith("2026-11-2")
    assert told.figures
