"""The report as one HTML page that needs nothing else: for a screen, a phone and paper."""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from peagle.bench.report.document import (
    Block,
    Cell,
    Counsel,
    Page,
    Plot,
    Plots,
    Row,
    SectionTitle,
    Table,
    Tables,
    Text,
)

STYLE = Path(__file__).with_name("page.css")
WHOLE = re.compile(r"P-EAGLE|EAGLE-3|n-gram|\d{4}-\d\d-\d\d")
"""What no line may end within, though it has hyphens."""


def html_page(document: Page) -> str:
    """The whole page."""
    body = "\n".join(part for block in document.blocks for part in _block(block))
    title = escape(document.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{_kept(document.title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _block(block: Block) -> Iterator[str]:
    match block:
        case SectionTitle(text, level):
            yield f"<h{level}>{escape(text)}</h{level}>"
        case Text(text, warns):
            yield f'<p class="warns">{_kept(text)}</p>' if warns else f"<p>{_kept(text)}</p>"
        case Counsel(situation, choice, why, sure):
            kind = "decision sure" if sure else "decision"
            told = f"{escape(situation)}: <b>{_kept(choice)}</b>"
            yield f'<p class="{kind}">{told}<small>{_kept(why)}</small></p>'
        case Table():
            yield _table(block)
        case Tables(tables):
            yield f'<div class="tables">{"".join(map(_table, tables))}</div>'
        case Plots(plots):
            yield f'<div class="plots">{"".join(map(_plot, plots))}</div>'


def _table(table: Table) -> str:
    title = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    head = "".join(_cell("th", cell, place < table.keys) for place, cell in enumerate(table.head))
    rows = "".join(f"<tr>{_row(row, table.keys)}</tr>\n" for row in table.rows)
    kind = "wide prose" if table.prose else "wide"
    return (
        f'<div class="{kind}"><table>{title}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>"
    )


def _row(row: Row, keys: int) -> str:
    return "".join(
        _cell("th" if place < keys else "td", cell, place < keys) for place, cell in enumerate(row)
    )


def _cell(tag: str, cell: str | Cell, text: bool) -> str:
    lines = (cell,) if isinstance(cell, str) else cell.lines
    first, *others = lines
    inner = _kept(first) + "".join(f"<small>{escape(line)}</small>" for line in others)
    names = ["text"] if text else []
    style = ""
    if isinstance(cell, Cell):
        names += ["strong"] if cell.strong else []
        style = f' style="--shade: {cell.shade:.2f}"' if cell.shade else ""
    kind = f' class="{" ".join(names)}"' if names else ""
    return f"<{tag}{kind}{style}>{inner}</{tag}>"


def _kept(text: str) -> str:
    """A text in which "K = 7", a method's name and a date stay on one line each."""
    kept = escape(text).replace(" = ", "&nbsp;=&nbsp;").replace(" ≤ ", "&nbsp;≤&nbsp;")
    return WHOLE.sub(r'<span class="whole">\g<0></span>', kept)


def _plot(plot: Plot) -> str:
    drawing = plot.svg[plot.svg.index("<svg") :]
    label = f'<svg role="img" aria-label="{escape(plot.title)}"'
    return f"<figure>{drawing.replace('<svg', label, 1)}</figure>"
