"""Tables in a terminal of any width."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

ENDLESS = 10_000


def print_table(console: Console, table: Table) -> None:
    """Print a table as wide as it is: a narrow terminal breaks its lines, and cuts no number."""
    endless = console.options.update(width=ENDLESS)
    table.width = Measurement.get(console, endless, table).maximum
    console.print(table, crop=False)
