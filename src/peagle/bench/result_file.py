"""The file in which a benchmark keeps what it has measured so far."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peagle.files import STDOUT, rewritten_file


@contextmanager
def result_file(path: Path | None) -> Iterator[Callable[[Any], None]]:
    """A function that writes a result as JSON; the next call replaces it with a longer one.

    So a file is whole after every call; `STDOUT` gets the last result when the block ends, however
    it ends. Without a path nothing is written. Raises `InputError` when the file cannot be written.
    """
    if path is None:
        yield lambda _: None
    elif path == STDOUT:
        results: list[Any] = []
        try:
            yield results.append
        finally:
            for last in results[-1:]:
                print(json.dumps(last, indent=1))
    else:
        with rewritten_file(path) as write:
            yield lambda result: write(json.dumps(result, indent=1) + "\n")
