"""measure.md's tables are those of the reports to which they link."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "measure.md").read_text()
LINK = re.compile(r"\(\.\./(benchmarks/\w+/results/\S+)/report\.md\)")
Row = dict[str, str]


def section(title: str) -> str:
    """What stands under a heading."""
    return re.split(r"^##+ ", PAGE.partition(f"# {title}\n")[2], flags=re.MULTILINE)[0]


def reports(text: str) -> list[list[Row]]:
    """The figures of every report that a text links to."""
    return [
        list(csv.DictReader((ROOT / place / "figures.csv").open())) for place in LINK.findall(text)
    ]


def tables(text: str) -> dict[str, list[str]]:
    """The cells of all tables' rows, by the words before the first colon or parenthesis."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    return {re.split(r":| \(", label)[0]: cells for label, *cells in rows}


def number(value: object) -> str:
    """With three digits or more, as reports have it."""
    found = float(str(value))
    return f"{found:,.0f}" if found >= 100 else f"{found:.1f}"


def rounds(row: Row) -> list[float]:
    return [float(speed) for speed in row["rounds"].split()]


def by(rows: list[Row], *names: str) -> dict[tuple[str, ...], Row]:
    return {tuple(row[name] for name in names): row for row in rows}


def loads(rows: list[Row]) -> list[str]:
    return sorted({row["concurrency"] for row in rows}, key=int)


def test_lookups():
    text = section("Drafts looked up")
    [rows] = reports(text)
    speeds, found = by(rows, "data", "method"), tables(text)
    for label, data in (("edit given code", "edits"), ("MT-Bench, as chats; this", "mt_bench")):
        [told] = [cells for name, cells in found.items() if name.startswith(label)]
        none, ngram = speeds[data, "none"], speeds[data, "ngram"]
        figures = (ngram["tokens_per_cycle"], ngram["acceptance_length"])
        shown = [
            number(none["otps"]),
            number(ngram["otps"]),
            f"{float(ngram['speed_up']):.2f}\u00d7",
        ]
        assert told == [*shown, *(f"{float(figure):.2f}" for figure in figures)]


def test_mixed_lengths():
    text = section("Mixed lengths")
    [rows] = reports(text)
    found = tables(text)
    for row in rows:
        method = row["method"].partition(",")[0].replace("none", "no speculation")
        mode = {"fixed": f"K = {row['k']}", "auto": "K by load"}[row["draft_length"]]
        ours = row["engine"] == "peagle"
        parts = [*([] if ours else ["vLLM"]), method, *([mode] if row["k"] != "0" else [])]
        ratio = f"{float(row['speed_up']):.2f}" if ours else ""
        assert found[", ".join(parts)] == [*map(number, rounds(row)), ratio]


def servers(number_of_report: int) -> tuple[list[Row], str]:
    """A report of two servers, and the page from its link on."""
    text = section("Servers, over HTTP")
    place = [match.end() for match in LINK.finditer(text)][number_of_report]
    return reports(text)[number_of_report], text[place:].partition("\n\n")[2].partition("\n\n")[0]


@pytest.mark.parametrize("number_of_report", [0, 1])
def test_servers(number_of_report: int):
    rows, text = servers(number_of_report)
    speeds, found = by(rows, "method", "concurrency"), tables(text)
    levels = loads(rows)
    assert [f"{levels[0]} clients", *levels[1:]] == next(iter(found.values()))
    for name, shown in (("peagle", "peagle"), ("vllm", "vLLM 0.26")):
        told = [", ".join(map(number, rounds(speeds[name, level]))) for level in levels]
        assert found[shown] == told
    pairs = [
        zip(*(rounds(speeds[name, c]) for name in ("peagle", "vllm")), strict=True) for c in levels
    ]
    ratios = [", ".join(f"{ours / theirs:.2f}" for ours, theirs in pair) for pair in pairs]
    assert found["ratio of the rounds"] == ratios


def test_gemma():
    text = section("Gemma 4 31B")
    found = tables(text)
    rows = {
        key: row for each in reports(text)[::-1] for key, row in by(each, "data", "method").items()
    }
    for label, method in (
        ("no speculation", "none"),
        ("P-EAGLE of 4 layers, K = 7, AL 3.5", "peagle"),
        ("EAGLE-3 of 1 layer, K = 5, AL 2.8", "eagle3"),
    ):
        told = []
        for data in ("gemma-4-31b", "gemma-4-31b-fp8"):
            row = rows.get((data, method))
            gain = f"{float(row['speed_up']):.2f}" if row and method != "none" else ""
            told += [number(row["otps"]) if row else "", gain]
        assert found[label] == told


def test_packed_targets():
    text = section("Packed targets")
    first, second = reports(text)
    found, speeds = tables(text), by(first, "data", "method", "concurrency")
    for label, *names in (
        ("gpt-oss-20b, no speculation", "gpt-oss-20b", "none"),
        ("gpt-oss-20b, P-EAGLE of 4 layers, K = 7, AL 3.94", "gpt-oss-20b", "peagle"),
        ("gpt-oss-120b, no speculation, one card of 80 GB", "gpt-oss-120b", "none"),
    ):
        rows = [speeds.get((*names, level)) for level in ("1", "8", "64")]
        assert found[label] == [number(row["otps"]) if row else "" for row in rows]
    experts = by(second, "data", "concurrency", "draft_length")
    keys = [("1", "fixed"), ("8", "fixed"), ("64", "auto")]
    one, eight, many = (number(experts["qwen3-30b-a3b-fp8", *key]["otps"]) for key in keys)
    assert f"{one}, {eight} and {many} (by load) tokens/s at 1, 8 and 64\nrequests" in text


@pytest.mark.parametrize(
    ("label", "way", "one_in"),
    [
        ("none of them", "device alone", "1"),
        ("bias", "bias", "1"),
        ("the same, sampled", "sampled, bias", "1"),
        ("log-probabilities", "log-probabilities", "1"),
        ("a grammar that allows everything", "grammar", "1"),
        ("one in eight with log-probabilities", "log-probabilities", "8"),
    ],
)
def test_requests_that_need_the_host(label: str, way: str, one_in: str):
    text = section("Requests that need the host")
    [rows] = reports(text)
    speeds = by(rows, "way", "one_in", "requests")
    told = [speeds.get((way, one_in, level)) for level in ("1", "8", "64")]
    shown = [number(row["tokens_per_second"]) if row else "" for row in told]
    assert tables(text)[label] == shown


@pytest.mark.parametrize(
    ("label", "method"), [("no speculation", "none"), ("P-EAGLE, K = 7, AL 3.94", "peagle")]
)
def test_batch_invariant(label: str, method: str):
    text = section("Equal text")
    [rows] = reports(text)
    speeds = by(rows, "method", "data", "concurrency")
    ways = ("qwen3-8b", "qwen3-8b, batch-invariant")
    told = [[number(speeds[method, way, level]["otps"]) for way in ways] for level in loads(rows)]
    assert tables(text)[label] == [", ".join(pair) for pair in told]
