"""A report of results that the scripts beside this one, or `peagle bench --json`, have written.

    python benchmarks/gpu/draw.py RESULT.json ... --out report

Takes what `compare.py`, `mixed.py`, `serve.py` (bench.json, with servers.json or without) and
`peagle bench` keep, several of a kind as one report, in which later figures replace earlier ones of
the same case; and rows such as `hosted.py`'s, `chats.py`'s and `first_token.py`'s, as a table.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from listed import Listed
from records import compared, merge, read
from told import SYNTHETIC, Told, days, run_of, shared

from peagle.bench.case import Case
from peagle.cli.script import run
from peagle.errors import InputError

Piece = Mapping[str, Any]
"""What a file holds."""
SIDES = ("fixed", "auto", "vllm")
"""In what `mixed.py` writes: ours with K fixed and by load, and vLLM."""
APART = (
    "Settings took turns within each command; what several commands measured ran one after the "
    "other."
)
LISTS = "Each round is another list of requests of random lengths, the same on both sides."


def main(
    files: Annotated[list[Path], typer.Argument(help="JSON files of results.")],
    out: Annotated[Path, typer.Option(help="Directory for the report.")],
) -> None:
    """Write the report and print its table."""
    found = drawn([read(path) for path in files])
    found.write(out)
    found.show()


def drawn(pieces: Sequence[Piece]) -> Told | Listed:
    """What a report tells of some files. Raises `InputError` where they are not of one kind."""
    kinds = [kind for kind in KINDS if any(kind in piece for piece in pieces)]
    if not kinds:
        raise InputError("of such results there is no report")
    if len(kinds) > 1:
        raise InputError(f"results of different kinds, {' and '.join(kinds)}, make no report")
    return KINDS[kinds[0]](pieces)


def mixed(pieces: Sequence[Piece]) -> Told:
    """Lists of requests of random lengths, each a round."""
    records = compared(merge([_as_records(piece) for piece in pieces]))
    firsts = {
        one.case.label: ", ".join(map(str, piece[side]["ttft_ms"]))
        for piece in pieces
        for side in SIDES
        if "ttft_ms" in piece.get(side, {})
        for one in compared(_as_records(piece, side)).runs
    }
    about = {**records.environment, "median TTFT of each list, ms": firsts}
    return replace(records, environment=about, notes=[LISTS])


def _as_records(piece: Piece, *sides: str) -> dict[str, Any]:
    """What `mixed.py` measured, as `compare.py` would keep it."""
    mix = piece["mix"]
    lengths = {
        name: f"median {mix[name][0]}, most {mix[name][1]}"
        for name in ("prompt_tokens", "output_tokens")
    }
    work = {"dtype": piece["dtype"], **mix, **lengths}
    records = [_record(piece, side) for side in sides or SIDES if side in piece]
    return {"environment": piece, "work": work, "records": records}


def _record(piece: Piece, side: str) -> dict[str, Any]:
    speeds, level = piece[side]["otps"], piece["mix"]["in_flight"]
    measured = {"concurrency": level, "otps": statistics.median(speeds), "rounds": speeds}
    return {
        **piece["match"],
        "side": "vllm" if side == "vllm" else "peagle",
        "captured": piece[side].get("captured"),
        "draft_length": "auto" if side == "auto" else "fixed",
        "concurrencies": [level],
        "runs": [measured],
        "failure": None,
    }


def benched(pieces: Sequence[Piece]) -> Told:
    """What `peagle bench` keeps, and `serve.py` beside it."""
    measured = [piece for piece in pieces if "runs" in piece]
    runs = {}
    for piece in measured:
        for entry in piece["runs"]:
            case = _case(entry, piece["environment"])
            runs[case] = run_of(case, entry)
    about = shared([piece["environment"] for piece in measured])
    notes = list(dict.fromkeys(note for piece in measured for note in piece.get("notes", ())))
    if len(measured) > 1:
        about["date"] = days([piece["environment"] for piece in measured])
        about |= {"synthetic": SYNTHETIC} if "synthetic" in about else {}
        notes.append(APART)
    for piece in pieces:
        about |= _servers(piece)
    return Told(about, list(runs.values()), notes)


def _case(entry: Piece, environment: Piece) -> Case:
    """Of made models the prompts are random, so that their shape stands in the prompts' place, in
    earlier files, too."""
    case = Case(**{one.name: entry[one.name] for one in fields(Case) if one.name in entry})
    shape = environment.get("shape")
    if shape is None or case.data not in (shape, Case.data):
        return case
    invariant = entry.get("batch_invariant", environment.get("batch_invariant"))
    return replace(case, data=f"{shape}, batch-invariant" if invariant else shape)


def _servers(piece: Piece) -> dict[str, Any]:
    """What `serve.py` knows of its servers."""
    if "servers" not in piece:
        return {}
    return {
        "device": piece["card"].get("name", "no GPU"),
        "share of memory of each": piece["memory"],
        "speculation": piece["speculation"],
        "processes": piece["servers"],
    }


def listed(pieces: Sequence[Piece]) -> Listed:
    """Rows of figures."""
    about = shared([{k: v for k, v in piece.items() if k != "rows"} for piece in pieces])
    about["date"] = days(pieces)
    return Listed(about, list(_rows(pieces)))


def _rows(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        yield from piece["rows"]


KINDS: dict[str, Callable[[Sequence[Piece]], Told | Listed]] = {
    "records": lambda pieces: compared(merge(pieces)),
    "mix": mixed,
    "runs": benched,
    "rows": listed,
}
"""What makes a report of files with such an entry."""


if __name__ == "__main__":
    run(main)
