"""README's figures against vLLM are those of the records, by the rule that measure.md states."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records import match_of, read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "gpu" / "results"
PLAIN = str.maketrans({"*": None, "\u2013": "-", "\u00d7": "x"})
README = (ROOT / "README.md").read_text().translate(PLAIN)
SHOWN = {
    ("qwen3-8b", "none", 0),
    ("qwen3-8b", "eagle3", 3),
    ("qwen3-8b", "peagle", 7),
    ("qwen3-30b-a3b", "peagle", 7),
}


def measured(name: str) -> dict[tuple[Any, ...], dict[str, list[float]]]:
    """Rounds by match and requests in flight, then by side and setting; the last run counts."""
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for record in read(RESULTS / name)["records"]:
        match = match_of(record)
        setting = record["captured"] if record["side"] == "vllm" else record["draft_length"]
        for run in record["runs"]:
            cell = found.setdefault((match.shape, match.method, match.k, run["concurrency"]), {})
            cell[f"{record['side']} {setting}"] = run["rounds"]
    return found


def figures() -> Iterator[str]:
    for name in ("comparison_2026-11-23.json", "experts_2026-11-25.json"):
        for (*match, requests), sides in measured(name).items():
            theirs = [statistics.median(rounds) for side, rounds in sides.items() if "vllm" in side]
            if tuple(match) not in SHOWN or not theirs:
                continue
            ours = ["fixed"] if match[1] != "peagle" or "30b" in match[0] else ["fixed", "auto"]
            for setting in ours if requests > 1 else ["fixed"]:
                rounds = sides[f"peagle {setting}"]
                middle = statistics.median(rounds)
                spread = f"{min(rounds):,.0f}-{max(rounds):,.0f}"
                yield f"{middle:,.0f} ({spread}), {middle / max(theirs):.2f}x"


@pytest.mark.parametrize("figure", list(figures()))
def test_readme_shows_the_median_its_spread_and_its_ratio(figure: str):
    assert f"| {figure} |" in README


def test_readme_shows_where_eagle3_wins():
    [run] = read(RESULTS / "eagle3_by_load_2026-11-24.json")["runs"]
    rounds = run["rounds"]
    shown = f"{statistics.median(rounds):,.0f} ({min(rounds):,.0f}-{max(rounds):,.0f})"
    assert f"| {shown}, vLLM not run |" in README
