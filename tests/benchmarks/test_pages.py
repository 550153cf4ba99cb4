"""Tables of pages: found by what they ask for, filled with figures, and current."""

import re
from pathlib import Path
from typing import Any

import pytest

from figures import stale
from peagle.errors import InputError
from records.pages import MARKED, SUPPORT, Table, drawn, newer, pages, read_tables, renewed
from records.result import Result, Run
from records.store import read_all

ABOUT: dict[str, Any] = {"measured": "It", "claim": "speed", "date": "2026-01-02"}
VERSIONS = {"peagle": {"peagle": "1"}, "vllm": {"vllm": "2"}}
FIGURE = re.compile(r"[\d.,]+ ?(%|us|ms|\u00d7|x)?")
BY_HAND = {
    "docs/first-drafter.md": "counted by a script, or others' figures",
    "docs/serve.md": "limits, not figures",
}
"""Pages with tables of numbers that are no results, and why."""


def run(method: str, k: int, rounds: tuple[float, ...], **more: Any) -> Run:
    return Run(
        **{"data": "set", "method": method, "k": k, "concurrency": 1, "rounds": rounds, **more}
    )


TURNS = Result(
    **ABOUT,
    versions=VERSIONS,
    runs=(
        run("none", 0, (10.0, 11.0, 10.0, 10.0, 12.0, 10.0)),
        run("peagle", 7, (20.0, 22.0, 21.0, 20.0, 24.0, 20.0), acceptance_length=3.5),
        run("peagle", 7, (15.0, 16.5, 15.0, 15.0, 18.0, 15.0), side="vllm"),
    ),
)
APART = Result(
    **{**ABOUT, "claim": "beside"},
    versions=VERSIONS,
    processes=[{"side": "vllm", "data": "set", "method": "none", "concurrencies": (1,)}],
    runs=(
        run("peagle", 7, (900.0, 1000.0, 1100.0)),
        run("peagle", 7, (400.0, 500.0, 800.0), side="vllm"),
        run("peagle", 7, (450.0, 600.0, 700.0), side="vllm", setting="graphs to 896 rows"),
        run("eagle3", 3, (750.0, 800.0, 850.0), side="vllm"),
        run("eagle3", 5, (700.0,)),
    ),
)
ROWS = Result(
    **{**ABOUT, "claim": "times"},
    rows=({"rows": 8, "us": 1234.5}, {"rows": 64, "us": 20.0, "W": 700.0}),
    units={"us": "us", "W": "W"},
)
PLAIN = str.maketrans({"\u2013": "-", "\u00d7": "x"})
HOUSE = {"turns": TURNS, "apart": APART, "rows": ROWS}


def cell(show: str, **wanted: Any) -> str:
    """The cell of a table of one."""
    table = Table(rows={"row": wanted}, columns={"column": {"show": show}})
    line = drawn("one", table, HOUSE).splitlines()[2].translate(PLAIN)
    return line.removeprefix("| row | ").removesuffix(" |")


@pytest.mark.parametrize(
    ("show", "told"),
    [
        ("{timed}", "20.0 (20.0-24.0)"),
        ("{speed}; {rounds}", "20.0; 20.0, 22.0, 21.0, 20.0, 24.0, 20.0"),
        ("{gained}", "2.00x (2.00-2.10)"),
        ("{accepted}, {al}, {cycle}, {ttft}, {same}", "3.50, 3.50, -, -, -"),
    ],
)
def test_figures_of_turns(show: str, told: str):
    assert cell(show, claim="speed", method="peagle") == told


def test_a_peer_s_gain_is_over_ours_without_speculation():
    assert cell("{gained}", claim="speed", side="vllm") == "1.50x (1.50-1.50)"


@pytest.mark.parametrize(
    ("show", "told"),
    [
        ("{peer}", "600 (450-700)"),
        ("{peer_ratio}; {peer_ratio_least}", "1.67x; 1.43x"),
        ("{peer_rounds}; {peer_ratios}", "450, 600, 700; 2.00, 1.67, 1.57"),
        ("{peer_best}; {peer_best_ratio}", "EAGLE-3, K = 3: 800 (750-850); 1.25x"),
        ("{gained}", "-"),
    ],
)
def test_figures_beside_a_peer(show: str, told: str):
    """Its fastest setting counts, and its fastest way of any method."""
    assert cell(show, claim="beside", method="peagle") == told


def test_what_was_not_run_is_said():
    assert cell("{timed}; {peer}", claim="beside", method="eagle3") == "700; not run"
    assert cell("{timed}", claim="beside", method="ngram") == ""
    table = Table(rows={"row": {"claim": "none"}}, columns={"c": {"show": "{x}"}}, missing="-")
    assert drawn("one", table, HOUSE).endswith("| row | - |\n")


def test_rows_are_found_by_their_columns():
    assert cell("{us:,.0f} us", claim="times", rows=8) == "1,234 us"
    assert cell("{W:.0f}", claim="times", rows=64, row=True) == "700"
    assert cell("{W:.0f}", claim="times", rows=8) == "-"
    with pytest.raises(InputError, match="no row of It has kW"):
        cell("{kW}", claim="times", rows=8)


def test_what_can_be_meant_twice_is_refused():
    with pytest.raises(InputError, match="2 figures of apart fit"):
        cell("{timed}", claim="beside", side="vllm", method="peagle")
    with pytest.raises(InputError, match="a run has no figure speeds"):
        cell("{speeds}", claim="speed", method="peagle")
    with pytest.raises(InputError, match="table one: row, c has no show"):
        drawn("one", Table(rows={"row": {}}, columns={"c": {}}), HOUSE)


def test_a_superseded_result_is_shown_no_more():
    later = TURNS.model_copy(update={"runs": (run("peagle", 7, (40.0,)),), "date": "2026-01-03"})
    old = TURNS.model_copy(update={"superseded_by": "later"})
    table = Table(of={"claim": "speed", "method": "peagle"}, rows={"r": {}}, columns={"c": {}})
    table = table.model_copy(update={"of": {**table.of, "show": "{timed}"}})
    assert (
        drawn("one", table, {"turns": TURNS})
        .translate(PLAIN)
        .endswith("| r | 20.0 (20.0-24.0) |\n")
    )
    assert drawn("one", table, {"turns": old, "later": later}).endswith("| r | 40.0 |\n")


def test_a_page_is_renewed_between_its_markers():
    table = Table(
        rows={"P-EAGLE ": {"claim": "times", "rows": 8}}, columns={"us": {"show": "{us}"}}
    )
    page = "before\n\n<!-- table one -->\nold\n<!-- /table -->\nafter\n"
    told = "| | us |\n| --- | --: |\n| P-EAGLE | 1234.5 |\n"
    fresh = renewed(page, {"one": table}, HOUSE)
    assert fresh == page.replace("old\n", f"\n{told.replace('| |', '|  |')}\n")
    assert renewed(fresh, {"one": table}, HOUSE) == fresh
    with pytest.raises(InputError, match="there is no table one"):
        renewed(page, {}, HOUSE)


def test_a_result_that_no_table_shows_is_newer_than_its_claim_s_tables():
    table = Table(rows={"r": {"claim": "times", "rows": 8}}, columns={"us": {"show": "{us}"}})
    late = ROWS.model_copy(update={"rows": ({"rows": 512, "us": 1.0},)})
    house = HOUSE | {"late": late}
    assert newer({"one": table}, house, ["a page"]) == ["late"]
    assert newer({"one": table}, house, ["a page", "see results/late.json"]) == []
    assert newer({"one": table}, HOUSE, []) == []


class TestOurs:
    """README, docs and `benchmarks/results` as they are."""

    def test_every_table_and_the_index_are_current(self):
        """`make figures` renews them."""
        assert [path.name for path, _ in stale()] == []

    def test_no_result_is_newer_than_the_tables_of_its_claim(self):
        assert newer(read_tables(), read_all(), (page.read_text() for page in pages())) == []

    def test_every_table_is_on_a_page(self):
        found = [name for page in pages() for _, name, _ in MARKED.findall(page.read_text())]
        assert sorted(found) == sorted([*read_tables(), SUPPORT])

    @pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
    def test_tables_of_figures_are_not_written_by_hand(self, page: Path):
        root = Path(__file__).parents[2]
        if str(page.relative_to(root)) in BY_HAND:
            return
        for line in MARKED.sub("", page.read_text()).splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
            figures = [
                cell for cell in cells if re.fullmatch(r"[\d.,]+ ?(%|us|ms|\u00d7|x)?", cell)
            ]
            assert not (line.startswith("|") and len(figures) > 1), line
