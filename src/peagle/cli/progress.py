"""Progress bars, drawn on a terminal only."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Update = Callable[..., None]
"""Takes what `rich.progress.Progress.update` takes: advance, completed, description."""


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Count to `total` on stderr while something runs; call the value for each step."""
    columns = [TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with _bar(Console(stderr=True), columns, total, transient=True) as update:
        yield partial(update, advance=1)


def run_bar(
    console: Console, what: str, total: int, done: int, **options: Any
) -> AbstractContextManager[Update]:
    """The bar of a run that an earlier one began: with the time left and the description."""
    told = TextColumn("{task.description}")
    columns = [TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), told]
    return _bar(console, columns, total, done, **options)


@contextmanager
def _bar(
    console: Console, columns: list[ProgressColumn], total: int, done: int = 0, **options: Any
) -> Iterator[Update]:
    hidden = not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, **options) as bar:
        yield partial(bar.update, bar.add_task("", total=total, completed=done))
