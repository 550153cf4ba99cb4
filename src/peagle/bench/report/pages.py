"""The report as one HTML page that needs nothing else, and as Markdown with its plots beside it."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from peagle.bench.report.document import Cell, Page

PLACE = Path(__file__).parent
WHOLE = re.compile(r"P-EAGLE|EAGLE-3|n-gram|\d{4}-\d\d-\d\d")
"""What no line may end within, though it has hyphens."""
MARKS = re.compile(r"[\\|*_<`]")
"""What Markdown reads as markup."""


def html_page(document: Page) -> str:
    """The whole page, for a screen, a phone and paper."""
    style = Markup((PLACE / "page.css").read_text(encoding="utf-8"))
    return _templates().get_template("page.html.j2").render(page=document, style=style).lstrip()


def markdown_page(document: Page) -> str:
    """The whole page."""
    return _templates().get_template("report.md.j2").render(page=document).lstrip()


@cache
def _templates() -> Environment:
    found = Environment(
        loader=FileSystemLoader(PLACE),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= {"kind": _kind, "kept": _kept, "plain": _plain, "marked": _marked}
    found.filters["drawing"] = _drawing
    return found


def _kind(block: Any) -> str:
    return type(block).__name__


def _kept(text: str) -> Markup:
    """A text in which "K = 7", a method's name and a date stay on one line each."""
    kept = re.sub(" ([=≤]) ", "\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", text)
    return Markup(WHOLE.sub(r'<span class="whole">\g<0></span>', str(escape(kept))))


def _marked(cell: str | Cell) -> str:
    """A table's cell in Markdown."""
    if isinstance(cell, str):
        return _plain(cell)
    mark = "**" if cell.strong else ""
    return mark + _plain(" · ".join(cell.lines)) + mark


def _plain(text: str) -> str:
    """A text that is no markup, on one line."""
    return " ".join(MARKS.sub(r"\\\g<0>", text).split())


def _drawing(svg: str) -> Markup:
    """An SVG file's drawing."""
    return Markup(svg[svg.index("<svg") :])
