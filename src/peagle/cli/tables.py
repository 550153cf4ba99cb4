"""Tables in a terminal of any width."""

import os

from rich.console import Console
from rich.measure import Measurement, measure_renderables
from rich.table import Table

ENDLESS, LEAST = 10_000, 10
"""Characters of a line without an end, and those that no column is folded under: numbers stay
whole, and the table gets too wide."""


def print_table(console: Console, table: Table) -> None:
    """Print a table within the terminal's width, and break no word or number as long as all fit.

    Where they do not, the longest is folded. Output that is not a terminal is as wide as the table,
    unless COLUMNS gives a width.
    """
    width = console.width if console.is_terminal or "COLUMNS" in os.environ else ENDLESS
    endless = console.options.update(width=ENDLESS)
    sizes = [measure_renderables(console, endless, [c.header, *c.cells]) for c in table.columns]
    frame = Measurement.get(console, endless, table).maximum - sum(size.maximum for size in sizes)
    widths = [size.minimum for size in sizes]
    spare = width - frame - sum(widths)
    if spare < 0:
        longest = widths.index(max(widths))
        widths[longest] = max(min(LEAST, widths[longest]), widths[longest] + spare)
    for column, size, least in zip(table.columns, sizes, widths, strict=True):
        more = min(max(spare, 0), size.maximum - size.minimum)
        column.width, column.overflow = least + more, "fold"
        spare -= more
    table.width = frame + sum(column.width or 0 for column in table.columns)
    console.print(table, crop=False)
