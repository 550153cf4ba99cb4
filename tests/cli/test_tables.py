"""Tables in narrow terminals, and in none."""

import io

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from peagle.cli.tables import print_table

HEADINGS = ["method", "K", "tokens/s", "speed-up", "acceptance length", "E2E ms", "same text"]
ROW = ["P-EAGLE", "7", "12345.6", "12.34x", "4.7412", "98765.4", "yes"]


def wide_table():
    table = Table(*HEADINGS, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_row(*ROW)
    return table


def printed(table, columns, terminal=True):
    file = io.StringIO()
    console = Console(file=file, width=columns, force_terminal=terminal, color_system=None)
    print_table(console, table)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("columns", [66, 70, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_cut(columns):
    lines = printed(wide_table(), columns)
    assert max(map(len, lines)) <= columns
    assert [line.split() for line in lines if "P-EAGLE" in line] == [ROW]
    words = " ".join(lines).split()
    assert {word for heading in HEADINGS for word in heading.split()} <= set(words)


def test_headings_break_where_they_do_not_fit():
    whole, broken = (printed(wide_table(), columns) for columns in (120, 70))
    assert any("acceptance length" in line for line in whole)
    assert not any("acceptance length" in line for line in broken)


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_no_number_is_broken_in_a_terminal_that_is_too_narrow(columns):
    lines = printed(wide_table(), columns)
    assert [line.split() for line in lines if "P-EAGLE" in line] == [ROW]


def test_a_long_text_is_folded_in_its_own_column():
    table = Table.grid(padding=(0, 2))
    table.add_row("directory", "a/" * 40)
    table.add_row("aux layers", "2, N/2, N-3 of the target's N")
    lines = printed(table, 40)
    assert max(map(len, lines)) <= 40
    assert "".join(line[11:].strip() for line in lines[:-2]) == "a/" * 40
    assert [line[11:].strip() for line in lines[-2:]] == ["2, N/2, N-3 of the target's N", ""]


def test_a_file_gets_the_whole_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table.grid(padding=(0, 2))
    table.add_row("directory", "a/" * 100)
    assert len(printed(table, 80, terminal=False)) == 1
