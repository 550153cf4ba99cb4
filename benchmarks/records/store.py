"""The folder of results: read, written, checked against one another, and listed in its index."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from peagle.errors import InputError
from peagle.files import replacing
from records.result import UNKNOWN, Result

RESULTS = Path(__file__).parents[1] / "results"
INDEX = "README.md"
LISTS = ("processes", "runs", "rows")
"""Keys whose entries have a line each."""
ABOUT = """# Results

Everything that we measured and keep, a file a result, in the schema of
[result.py](../records/result.py). `python benchmarks/keep.py` adds one and `make figures` renews
this index and the tables of the pages; `make reports` draws a page with plots of each result. What
a result that is superseded measured was measured again; the pages show the later one.

| result | measured | on | date | commit | superseded by |
|---|---|---|---|---|---|
"""
Results = Mapping[str, Result]


def read(path: Path) -> Result:
    """A result's file. Raises `InputError` for what is not in the schema."""
    try:
        return Result.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the result"
        raise InputError(f"{path}: {place}: {first['msg']}") from None


def read_all(place: Path = RESULTS) -> dict[str, Result]:
    """All results by their names. Raises `InputError` where one is wrong, or two disagree."""
    results = {path.stem: read(path) for path in sorted(place.glob("*.json"))}
    for problem in problems(results):
        raise InputError(problem)
    return results


def text_of(result: Result) -> str:
    """A result as its file holds it: a line for each process, run and row."""
    values: dict[str, Any] = result.model_dump(mode="json", exclude_defaults=True)
    parts = [f" {json.dumps(name)}: {_block(name, value)}" for name, value in values.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(result: Result, path: Path) -> None:
    """Write a result's file, which appears whole or not at all."""
    Result.model_validate(result.model_dump())  # what `model_copy` made was not checked
    with replacing(path) as scratch:
        scratch.write_text(text_of(result), encoding="utf-8")


def problems(results: Results) -> Iterator[str]:
    """What is wrong with results beside one another, a sentence each."""
    found: dict[tuple[object, ...], str] = {}
    for name, result in results.items():
        later = result.superseded_by
        if result.claim == UNKNOWN:
            yield f"{name} has no claim"
        if later is not None:
            if later not in results:
                yield f"{name} is superseded by {later}, which is not there"
            elif results[later].superseded_by is not None or results[later].day < result.day:
                yield f"{name} is superseded by {later}, which is older or superseded itself"
            continue
        cases = list(_cases(result))
        for other in dict.fromkeys(found[case] for case in cases if case in found):
            yield f"{name} and {other} measured the same; say which one is superseded"
        found |= dict.fromkeys(cases, name)


def index(results: Results) -> str:
    """The index: a line a result, the newest first."""
    ordered = sorted(results.items(), key=lambda item: (item[1].date, item[0]), reverse=True)
    return ABOUT + "".join(_line(name, result) for name, result in ordered)


def _cases(result: Result) -> Iterator[tuple[object, ...]]:
    about = result.claim, result.machine.device, json.dumps(result.setting, sort_keys=True)
    yield from {(*about, *run.case) for run in result.runs}
    yield from {(*about, *result.row_case(row)) for row in result.rows}


def _block(name: str, value: Any) -> str:
    if name not in LISTS:
        return json.dumps(value, ensure_ascii=False)
    lines = (json.dumps(entry, ensure_ascii=False) for entry in value)
    return "[\n  " + ",\n  ".join(lines) + "\n ]"


def _line(name: str, result: Result) -> str:
    later = f"[{result.superseded_by}]({result.superseded_by}.json)" if result.superseded_by else ""
    cells = f"[{name}]({name}.json)", result.measured, result.machine.device, result.day
    return f"| {' | '.join((*cells, result.commit, later))} |\n"
