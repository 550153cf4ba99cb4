"""Tables in a terminal of any width."""

import os
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

from rich.console import Console
from rich.measure import Measurement, measure_renderables
from rich.table import Column, Table

ENDLESS = 10_000


def print_table(console: Console, table: Table, keys: int = 1) -> None:
    """Print a table within the terminal's width, and no number broken.

    Headings and texts break between words, then columns move closer together. Those that still do
    not fit follow below, after the first `keys` columns once more. Output that is not a terminal is
    as wide as the table, unless COLUMNS gives a width.
    """
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else ENDLESS
    columns = [_sized(console, column) for column in table.columns]
    for spaced in (table, _closer(table)):
        frames = _frames(console, spaced)
        parts = list(_parts(columns, keys, [width - frame for frame in frames]))
        if len(parts) == 1:
            break
    for part in parts:
        frame = frames[len(part)]
        widths = _widths(part, width - frame)
        shown = [
            replace(one.column, width=each, overflow="fold")
            for one, each in zip(part, widths, strict=True)
        ]
        fitted = _with_columns(spaced, shown)
        fitted.width = sum(widths) + frame
        console.print(fitted, crop=False)


@dataclass(frozen=True)
class _Sized:
    """A column, with the widths of its longest word and of its longest line."""

    column: Column
    word: int
    line: int


def _sized(console: Console, column: Column) -> _Sized:
    endless = console.options.update(width=ENDLESS)
    size = measure_renderables(console, endless, [column.header, *column.cells])
    return _Sized(column, size.minimum, size.maximum)


def _closer(table: Table) -> Table:
    """With one space between columns, where the box has one."""
    other = copy(table)
    if table.box is not None:
        other.padding = 0
    return other


def _frames(console: Console, table: Table) -> list[int]:
    """What a table is wide besides the text of none of its columns, of one, ..."""
    endless = console.options.update(width=ENDLESS)
    empty = [
        _with_columns(table, [Column(width=0)] * count) for count in range(len(table.columns) + 1)
    ]
    return [Measurement.get(console, endless, each).maximum for each in empty]


def _parts(columns: Sequence[_Sized], keys: int, rooms: Sequence[int]) -> Iterator[list[_Sized]]:
    """Columns that go side by side; rooms: the width for the text of none, of one, ..."""
    first = list(columns[:keys])
    part = first
    for column in columns[keys:]:
        longer = [*part, column]
        if len(part) > keys and sum(one.word for one in longer) > rooms[len(longer)]:
            yield part
            longer = [*first, column]
        part = longer
    yield part


def _widths(part: Sequence[_Sized], room: int) -> list[int]:
    """Each column's longest word, and from the left what is left; a word beyond that is folded."""
    widths = [one.word for one in part]
    spare = room - sum(widths)
    if spare < 0:
        longest = widths.index(max(widths))
        widths[longest] = max(1, widths[longest] + spare)
        return widths
    for index, one in enumerate(part):
        more = min(spare, one.line - one.word)
        widths[index] += more
        spare -= more
    return widths


def _with_columns(table: Table, columns: Sequence[Column]) -> Table:
    """The same table with other columns."""
    other = copy(table)
    other.columns = [replace(column, _index=index) for index, column in enumerate(columns)]
    return other
