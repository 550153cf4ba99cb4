"""The report as Markdown, with its plots in files beside it."""

from collections.abc import Iterator

from peagle.bench.report.document import (
    Block,
    Cell,
    Counsel,
    Page,
    Plots,
    SectionTitle,
    Table,
    Tables,
    Text,
)


def markdown_page(document: Page) -> str:
    """The whole page."""
    parts = [f"# {document.title}", *(part for one in document.blocks for part in _block(one))]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> Iterator[str]:
    match block:
        case SectionTitle(text, level):
            yield f"{'#' * level} {text}"
        case Text(text, warns):
            yield f"**{_plain(text)}**" if warns else _plain(text)
        case Counsel(situation, choice, why, _):
            yield f"{_plain(situation)}: **{_plain(choice)}**. {_plain(why)}"
        case Table():
            yield _table(block)
        case Tables(tables):
            yield from map(_table, tables)
        case Plots(plots):
            for plot in plots:
                yield f"![{plot.title}]({plot.name})"


def _table(table: Table) -> str:
    title = [f"**{table.title}**", ""] if table.title else []
    rules = ["---" if place < table.keys else "--:" for place in range(len(table.head))]
    rows = [table.head, rules, *table.rows]
    return "\n".join([*title, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def _cell(cell: str | Cell) -> str:
    text = cell if isinstance(cell, str) else " · ".join(cell.lines)
    plain = _plain(text)
    return f"**{plain}**" if isinstance(cell, Cell) and cell.strong else plain


def _plain(text: str) -> str:
    """A text that is no markup, on one line."""
    for mark in ("\\", "|", "*", "_", "<", "`"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())
