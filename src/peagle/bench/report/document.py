"""A report's blocks, from which its page and its Markdown are written."""

from collections.abc import Sequence
from typing import NamedTuple


class Cell(NamedTuple):
    """A table's cell of one or several lines."""

    lines: tuple[str, ...]
    shade: float = 0.0
    """From 0 to 1: how much it stands out."""
    strong: bool = False


Row = Sequence[str | Cell]


class SectionTitle(NamedTuple):
    """A section's title."""

    text: str


class Text(NamedTuple):
    """A paragraph."""

    text: str
    warns: bool = False


class Counsel(NamedTuple):
    """What to do in one situation, and why."""

    situation: str
    choice: str
    why: str
    sure: bool


class Table(NamedTuple):
    """A table; its first `keys` columns are texts, the others numbers."""

    head: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    keys: int = 1
    prose: bool = False
    """Whether the others are texts too."""


class Tables(NamedTuple):
    """Tables that may stand side by side, and are shown where they are asked for."""

    title: str
    tables: Sequence[Table]


class Plot(NamedTuple):
    """A drawing, as SVG, and what it shows in words."""

    name: str
    title: str
    svg: str


class Plots(NamedTuple):
    """Drawings, one below the other."""

    plots: Sequence[Plot]


Block = SectionTitle | Text | Counsel | Table | Tables | Plots


class Page(NamedTuple):
    """A title, and what stands below it."""

    title: str
    blocks: Sequence[Block]
