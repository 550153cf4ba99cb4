"""Where data comes from: JSONL files and Hugging Face datasets."""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peagle.errors import InputError, lacking, reason

DATASET = "hf:"
LOADERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
"""Names that `datasets` gives the formats of single files."""
Record = tuple[str, dict[str, Any]]
"""An object and its place, as file:line."""


def read_records(sources: Sequence[str]) -> Iterator[Record]:
    """Every object of some sources, in order.

    A source is a JSONL file, also compressed (.gz), or `hf:ID_OR_PATH[:SPLIT]` for what
    `datasets.load_dataset` takes, of which null keys are left out.
    Raises `InputError` naming the source and the line that cannot be read.
    """
    for source in sources:
        rows = source.startswith(DATASET) or source.endswith(".parquet")
        yield from _read_dataset(source) if rows else _read_file(source)


def _read_file(path: str) -> Iterator[Record]:
    opened = gzip.open if path.endswith(".gz") else open
    try:
        with opened(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from None


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig").rstrip())
        json.dumps(value, ensure_ascii=False).encode()  # an escape may be half of a surrogate pair
    except UnicodeError as error:
        raise InputError(f"{place}: not valid UTF-8 text: {error}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{place}: not a JSON object")
    return value


def _read_dataset(source: str) -> Iterator[Record]:
    name, _, split = source.removeprefix(DATASET).partition(":")
    try:
        for number, row in enumerate(_load_dataset(name, split or "train"), start=1):
            yield f"{source}:{number}", without_nulls(row)
    except ModuleNotFoundError as error:
        raise InputError(lacking(f"{source} needs {error.name}", "data")) from None
    except Exception as error:  # datasets and the hub raise many kinds of errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(f"{source} cannot be read: {reason}") from None


def without_nulls(value: Any) -> Any:
    """A value without null keys: in Arrow's columns every object has the keys of all objects."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else value


def _load_dataset(name: str, split: str) -> Iterable[dict[str, Any]]:
    """Rows as they arrive, without a copy of the dataset on this machine."""
    from datasets import load_dataset, load_from_disk  # slow to import, and an extra

    if os.path.isfile(name):
        kind = LOADERS.get(Path(name).suffix)
        if kind is None:
            raise ValueError(f"give a directory, or a file of {', '.join(LOADERS)}")
        return load_dataset(kind, data_files={split: name}, split=split, streaming=True)
    if os.path.isfile(Path(name) / "state.json"):
        return load_from_disk(name)
    return load_dataset(name, split=split, streaming=True)
