"""The report on made-up runs: what it says, and that it fits a phone."""

import csv
import io
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from peagle.bench.advice import Price
from peagle.bench.case import Case, Grid
from peagle.bench.measures import NOT_MEASURED, Measures, Percentiles
from peagle.bench.report.report import Report
from peagle.bench.runs import Failure, Run

TIMES = Percentiles(12.5, 20.0, 1234.5)
GRID = Grid([1, 8], ["HumanEval", "mt_bench"], draft_lengths=["fixed", "auto"])
PRICE = Price(3.6, 5000.0)
CASES = GRID.cases(["none", "peagle"], {"peagle": [3, 7]})
FACTS = {"date": "2026-11-25T10:00:00", "cpu": "made <up>", "versions": {"peagle": "0.1.0"}}


def run(case, faster=0.0):
    k = case.k or 0
    rates = tuple(0.8 ** (place + 1) for place in range(k))
    otps = 100.0 * case.concurrency * (1 + 0.2 * k + faster)
    found = Measures(otps, 1 + sum(rates), rates, TIMES, TIMES, TIMES, 128)
    return Run(case, found, ((1,),), True, rounds=tuple(otps * (1 + n / 1000) for n in range(6)))


RUNS = [run(case) for case in CASES]


def written(place, runs=RUNS, notes=(), price=PRICE, facts=FACTS, failures=()):
    place.mkdir(exist_ok=True)
    Report(place, price, "peagle bench --k 3,7").write(facts, runs, notes, failures)
    return {path.name: path.read_text() for path in place.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return written(tmp_path_factory.mktemp("report"), notes=["a server lied | twice"])


class Cells(HTMLParser):
    """The texts of a page's tables, row by row."""

    def __init__(self):
        super().__init__()
        self.rows, self.inside = [], False

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.inside = True
            self.rows[-1].append("")
        if tag == "small" and self.inside:
            self.rows[-1][-1] += " / "

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data.replace("\N{NO-BREAK SPACE}", " ")


def rows(page):
    cells = Cells()
    cells.feed(page)
    return cells.rows


def test_the_page_needs_nothing_else(files):
    page = files["index.html"]
    assert not re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?(?:https?:|[\w-]+\.svg)', page)
    assert page.count("<svg") == page.count("</svg>") == 6
    assert "made &lt;up&gt;" in page


def test_a_decision_comes_first_with_its_gain_and_what_is_as_fast(files):
    page = files["report.md"]
    first = page.index("1 in flight, HumanEval: **P-EAGLE, K = 7**. 240 tokens/s, 2.40x over no")
    assert first < page.index("## HumanEval")
    assert "Not clearly slower: P-EAGLE, K ≤ 7." in page
    assert page.count("in flight, ") == 4


def test_the_grid_has_speed_speed_up_and_al_of_every_case(files):
    found = rows(files["index.html"])
    assert ["setting", "C = 1", "C = 8"] in found
    row = ["P-EAGLE, K = 3", "160 / 1.60x / AL 2.95", "1,280 / 1.60x / AL 2.95"]
    assert found.count(row) == 2  # a grid for each set of prompts


def test_how_sure_speed_and_al_are(tmp_path):
    bounded = replace(RUNS[1].measures, acceptance_length_interval=(2.81, 3.1))
    page = written(tmp_path, [RUNS[0], replace(RUNS[1], measures=bounded)])["index.html"]
    found = rows(page)
    assert ["setting", "C", "tokens/s", "speed-up", "AL", "same text"] in found
    (row,) = (row for row in found if row[:2] == ["P-EAGLE, K = 3", "1"] and len(row) == 6)
    assert row[4] == "2.95 (2.81-3.10)"


def test_latencies_have_their_percentiles_and_drafts_their_positions(files):
    found = rows(files["index.html"])
    assert found.count(["no speculation", "8", "12.5", "20.0", "1,234"]) == 2 * 3
    assert ["P-EAGLE, K = 3", "1", "80", "64", "51", "", "", "", ""] in found


def test_costs_are_those_of_the_price_and_the_rate(files, tmp_path):
    found = rows(files["index.html"])
    assert ["C = 1, HumanEval", "P-EAGLE, K = 7", "0.24", "4.17", "21"] in found
    assert "What it costs" not in written(tmp_path, price=Price())["index.html"]


def test_figures_that_should_not_be_believed_are_said_to_be(files, tmp_path):
    assert "**a server lied \\| twice**" in files["report.md"]
    busy = [replace(one, core_share=0.5) for one in RUNS]
    assert (
        "Do not rely on these figures: the machine was busy" in written(tmp_path, busy)["report.md"]
    )


def test_without_a_clear_gain_no_speculation_is_advised(tmp_path):
    runs = [run(case, faster=-0.2 * (case.k or 0)) for case in CASES[:3]]
    page = written(tmp_path, runs)["report.md"]
    assert "HumanEval: **no speculation**. 100 tokens/s" in page


def test_too_few_rounds_name_nobody_as_fast_as_the_fastest(tmp_path):
    """A server that is three times as fast is not `not clearly slower` than the other."""
    cases = [Case(name, None, 64) for name in ("vllm", "peagle")]
    runs = [run(case) for case in cases]
    speeds = {"vllm": (11000.0, 13000.0), "peagle": (30000.0, 32000.0)}
    runs = [
        replace(
            one,
            rounds=speeds[one.case.method],
            measures=replace(one.measures, otps=speeds[one.case.method][0]),
        )
        for one in runs
    ]
    first_last = (runs, runs[::-1])
    told = [written(tmp_path / str(i), each)["report.md"] for i, each in enumerate(first_last)]
    assert (
        "**peagle**. 30,000 tokens/s, 2.59x over vllm, in too few rounds to be sure.\n" in told[0]
    )
    assert "**peagle**. 30,000 tokens/s, the fastest, in too few rounds to be sure.\n" in told[1]


def test_a_reference_that_varies_says_so(tmp_path):
    runs = [replace(RUNS[0], same_text=False), replace(RUNS[1], same_text=False)]
    page = written(tmp_path, runs)["index.html"]
    told = [row[-1] for row in rows(page) if len(row) == 6][1:]
    assert told == ["varies", "no"]
    assert (
        "no speculation wrote different text in different rounds, so that no other text can be the "
        "same."
    ) in page


def test_the_markdown_shows_the_plots_beside_it(files):
    shown = re.findall(r"!\[.+\]\((.+)\)", files["report.md"])
    assert sorted(shown) == sorted(name for name in files if name.endswith(".svg"))
    assert all(files[name].lstrip().startswith("<?xml") for name in shown)


def test_every_figure_is_in_the_csv(files):
    found = list(csv.DictReader(io.StringIO(files["figures.csv"])))
    assert len(found) == len(RUNS)
    fast = next(row for row in found if (row["k"], row["data"]) == ("7", "mt_bench"))
    assert (float(fast["otps"]), float(fast["speed_up"])) == pytest.approx((240.0, 2.4))
    assert float(fast["speed_up_low"]) - 1e-9 <= 2.4 <= float(fast["speed_up_high"]) + 1e-9
    assert float(fast["itl_ms_p99"]) == 1234.5
    assert len(fast["acceptance_rate_per_position"].split()) == 7
    assert len(fast["rounds"].split()) == 6


def test_servers_are_reported_too(tmp_path):
    none = replace(RUNS[0].measures, acceptance_length=None)
    named = [Case(name, None, 0, request_rate=rate) for rate in (2.0, 4.0) for name in "ab"]
    runs = [replace(run(replace(case, concurrency=1)), case=case) for case in named]
    runs[0] = replace(runs[0], measures=none)
    files = written(tmp_path, runs, facts={"servers": [{"name": "a", "version": "vllm 1"}]})
    assert "Servers measured" in files["index.html"]
    assert ["server 1", "a, vllm 1"] in rows(files["index.html"])
    assert ["setting", "2/s", "4/s"] in rows(files["index.html"])


def engine_run(engine, otps, concurrency=1, k=7, **others):
    """In no round both a peer and ours are as fast as their medians."""
    case = Case("P-EAGLE, AL 3.94", k, concurrency, data="a size", engine=engine, **others)
    times = NOT_MEASURED if case.is_peer else TIMES
    found = Measures(otps, None, (), times, times, times, 128)
    turns = (1.1, 1.0, 0.9) if case.is_peer else (1.0, 0.9, 1.1)
    return Run(case, found, (), rounds=tuple(otps * turn for turn in turns))


LATENCIES = ("setting", "C", "p50", "p95", "p99")
ENGINES = [
    engine_run("peagle", 600.0),
    engine_run("peagle", 900.0, 8),
    engine_run("peagle", 1000.0, 8, draft_length="auto"),
    engine_run("peagle", 700.0, k=3),
    engine_run("vLLM", 400.0),
    engine_run("vLLM", 600.0, 8),
    engine_run("vLLM, graphs to 896 rows", 750.0, 8),
]


def test_engines_are_compared_with_a_peers_fastest_setting(tmp_path):
    files = written(tmp_path, ENGINES, facts={"synthetic": "SYNTHETIC: made up"})
    found = rows(files["index.html"])
    assert ["peagle: P-EAGLE, AL 3.94, K = 7", "600 / 1.50x", "900 / 1.20x"] in found
    assert ["peagle: P-EAGLE, AL 3.94, K ≤ 7", "-", "1,000 / 1.33x"] in found
    assert ["peagle: P-EAGLE, AL 3.94, K = 3", "700", "-"] in found  # no peer ran it
    assert ["vLLM: P-EAGLE, AL 3.94, K = 7", "400 / 1.00x", "600 / 0.80x"] in found
    assert ["vLLM, graphs to 896 rows: P-EAGLE, AL 3.94, K = 7", "-", "750 / 1.00x"] in found
    page = files["report.md"]
    assert page.startswith("# Engines measured\n\n**SYNTHETIC: made up**")
    assert "1,000 tokens/s, 1.33x over vLLM, graphs to 896 rows: P-EAGLE, AL 3.94, K = 7." in page
    assert "one median over the other" in page


def test_what_a_peer_does_not_tell_is_left_out(tmp_path):
    files = written(tmp_path, ENGINES)
    latencies = [row for row in rows(files["index.html"]) if len(row) == len(LATENCIES)]
    assert ["peagle: P-EAGLE, AL 3.94, K = 7", "8", "12.5", "20.0", "1,234"] in latencies
    assert not [row for row in latencies if row[0].startswith("vLLM")]
    assert "vLLM: " in files["plot1-speed.svg"]
    assert "vLLM: " not in files["plot1-user.svg"]


def test_what_failed_is_told_with_all_its_lines(tmp_path):
    why = Failure(CASES[1], "exit status 1\nno <memory>")
    files = written(tmp_path, failures=[why])
    name = "P-EAGLE, K = 3, 1 in flight, HumanEval"
    assert [name, "exit status 1 / no <memory>"] in rows(files["index.html"])
    assert f"| {name} | exit status 1 · no \\<memory> |" in files["report.md"]
    assert "What failed" not in written(tmp_path)["report.md"]


def test_one_case_alone_has_a_report(tmp_path):
    assert "1 in flight, HumanEval" in written(tmp_path, RUNS[:1])["report.md"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("needs chromium")
    options = ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(flag)
    with Chrome(options, Service(shutil.which("chromedriver"))) as driver:
        yield driver


@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_and_its_tables_are_no_wider_than_the_screen(files, browser, tmp_path, width):
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    wide = "return [...document.querySelectorAll('.wide')].map(e => e.scrollWidth - e.clientWidth)"
    for found in (files, written(tmp_path, ENGINES)):
        page = tmp_path / "page.html"
        page.write_text(found["index.html"])
        browser.get(page.as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert max(browser.execute_script(wide)) <= 0
