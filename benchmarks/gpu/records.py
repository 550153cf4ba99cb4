"""Records of both sides: written after each process, merged from parts, shown as a table."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matches import Match

from peagle.bench.pair import NAMES
from peagle.bench.result_file import result_file
from peagle.errors import InputError

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One match at one number of requests in flight: each side's median round, if any."""

    match: Match
    concurrency: int
    ours: float | None
    by_load: float | None
    """Ours with K by load."""
    theirs: float | None
    """vLLM's faster setting."""
    captured: int | None
    """Rows up to which that setting captures graphs; None is vLLM's default."""
    moe_backend: str | None = None
    """That setting's kernels for experts; None is vLLM's own choice."""

    def ratio(self, ours: float | None) -> float | None:
        """Output tokens per second over vLLM's."""
        return ours / self.theirs if ours and self.theirs else None


def cells(records: Sequence[Record]) -> list[Cell]:
    """Every match and number of requests that a record names, in the records' order."""
    asked = dict.fromkeys((match_of(r), c) for r in records for c in r["concurrencies"])
    return [_cell(records, match, concurrency) for match, concurrency in asked]


def _cell(records: Sequence[Record], match: Match, concurrency: int) -> Cell:
    ours: dict[str, float] = {}
    theirs: dict[tuple[int | None, str | None], float] = {}
    for record in records:
        for run in record["runs"]:
            if match_of(record) == match and run["concurrency"] == concurrency:
                if record["side"] == "peagle":
                    ours[record.get("draft_length", "fixed")] = run["otps"]
                else:
                    theirs[record["captured"], record.get("moe_backend")] = run["otps"]
    fastest = max(theirs, key=lambda setting: theirs[setting], default=(None, None))
    speeds = (ours.get("fixed"), ours.get("auto"), theirs.get(fastest))
    return Cell(match, concurrency, *speeds, *fastest)


def match_of(record: Record) -> Match:
    """The match that a record belongs to."""
    return Match(*(record[name] for name in ("shape", "method", "k", "acceptance_length")))


def label(match: Match) -> str:
    """A method's name in tables and plots."""
    drafts = f", K = {match.k}, AL {match.acceptance_length:g}" if match.k else ""
    return ("no speculation" if match.method == "none" else NAMES[match.method]) + drafts


def table(results: Mapping[str, Any]) -> str:
    """A Markdown page: what it was measured on, a line per cell, and what failed."""
    lines = [
        caption(results),
        "",
        "| shape | method | requests in flight | peagle, tokens/s | with K by load "
        "| vLLM, tokens/s | peagle ÷ vLLM | with K by load | vLLM's setting |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
        *(_row(cell) for cell in cells(results["records"])),
        *_failures(results["records"]),
    ]
    return "\n".join(lines) + "\n"


def caption(results: Mapping[str, Any]) -> str:
    """What a reader must know of every figure."""
    work, environment = results["work"], results["environment"]
    versions = {name: found for r in results["records"] for name, found in _versions(r)}
    names = ", ".join(f"{name} {found}" for name, found in sorted(versions.items()))
    routing = f"{work['routing']} routing, " if work.get("routing") else ""
    return (
        f"SYNTHETIC: random weights, acceptance length (AL) given; only the times mean anything. "
        f"{environment['device']}, {work['dtype']}, {work['prompt_tokens']} prompt and "
        f"{work['max_tokens']} output tokens, {routing}greedy, no prefix caching, median of "
        f"{work['rounds']} rounds, {_dates(results)}; {names or 'nothing ran'}."
    )


def _dates(results: Mapping[str, Any]) -> str:
    """The days on which a run began, or the runs that were merged."""
    begun = [results, *results["records"]]
    days = {
        each["environment"]["date"][:10] for each in begun if "date" in each.get("environment", {})
    }
    return " to ".join(sorted({min(days), max(days)}))


def _versions(record: Record) -> Iterator[tuple[str, str]]:
    found = record.get("environment", {}).get("versions", {})
    kept = {"peagle": ("peagle", "torch"), "vllm": ("vllm",)}[record["side"]]
    return ((name, found[name]) for name in kept if name in found)


def _row(cell: Cell) -> str:
    found = (cell.ours, cell.by_load, cell.theirs)
    speeds = ["-" if each is None else f"{each:,.0f}" for each in found]
    ratios = [cell.ratio(each) for each in (cell.ours, cell.by_load)]
    times = ["-" if each is None else f"**{each:.2f}**" for each in ratios]
    last = "-" if cell.theirs is None else _setting(cell)
    columns = (cell.match.shape, label(cell.match), cell.concurrency, *speeds, *times, last)
    return f"| {' | '.join(map(str, columns))} |"


def _setting(cell: Cell) -> str:
    """vLLM's setting, where it was not left to vLLM."""
    graphs = f"graphs to {cell.captured} rows" if cell.captured else None
    given = [part for part in (cell.moe_backend, graphs) if part]
    return ", ".join(given) or "its own choice"


def _failures(records: Sequence[Record]) -> Iterator[str]:
    """The failures of records whose figures no other record has."""
    measured = {(_kind(record), run["concurrency"]) for record in records for run in record["runs"]}
    for record in records:
        asked = {(_kind(record), concurrency) for concurrency in record["concurrencies"]}
        if record["failure"] and asked - measured:
            yield f"\n{record['side']} failed on {record['shape']}, {label(match_of(record))}:\n"
            yield f"```text\n{record['failure']}\n```"


def _kind(record: Record) -> tuple[Any, ...]:
    settings = (record.get(name) for name in ("draft_length", "moe_backend"))
    return record["side"], match_of(record), record["captured"], *settings


def merge(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results as if from one run; a later figure replaces an earlier one of the same kind.

    Raises `InputError` for different work or different cards.
    """
    *others, last = pieces
    for other in others:
        same_card = other["environment"]["device"] == last["environment"]["device"]
        if other["work"] != last["work"] or not same_card:
            raise InputError("results of different work or different cards do not belong together")
    return {**last, "records": [record for piece in pieces for record in piece["records"]]}


def write(results: Mapping[str, Any], path: Path) -> None:
    """Write the results file whole."""
    with result_file(path) as put:
        put(results)


def read(path: Path) -> dict[str, Any]:
    """A results file. Raises `InputError`."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return found
