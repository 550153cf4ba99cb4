"""Progress bars, drawn on a terminal only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Update = Callable[..., None]
"""Takes what `rich.progress.Progress.update` takes: advance, completed, description."""


@contextmanager
def progress_bar(
    console: Console, what: str, total: int, done: int = 0, **options: Any
) -> Iterator[Update]:
    """A bar from what an earlier run has done to `total`, with the time left and a description."""
    told = TextColumn("{task.description}")
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), told)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, **options) as bar:
        yield partial(bar.update, bar.add_task("", total=total, completed=done))
