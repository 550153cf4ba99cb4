"""A report's blocks, from which its page and its Markdown are written."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A table's cell of one or several lines."""

    lines: tuple[str, ...]
    shade: float = 0.0
    """From 0 to 1: how much it stands out."""
    strong: bool = False


Row = Sequence[str | Cell]


@dataclass(frozen=True)
class SectionTitle:
    """A section's title."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    warns: bool = False


@dataclass(frozen=True)
class Counsel:
    """What to do in one situation, and why."""

    situation: str
    choice: str
    why: str
    sure: bool


@dataclass(frozen=True)
class Table:
    """A table; its first `keys` columns are texts, the others numbers."""

    head: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    keys: int = 1
    prose: bool = False
    """Whether the others are texts too."""


@dataclass(frozen=True)
class Tables:
    """Tables that may stand side by side, and are shown where they are asked for."""

    title: str
    tables: Sequence[Table]


@dataclass(frozen=True)
class Plot:
    """A drawing, as SVG, and what it shows in words."""

    name: str
    title: str
    svg: str


@dataclass(frozen=True)
class Plots:
    """Drawings, one below the other."""

    plots: Sequence[Plot]


Block = SectionTitle | Text | Counsel | Table | Tables | Plots


@dataclass(frozen=True)
class Page:
    """A title, and what stands below it."""

    title: str
    blocks: Sequence[Block]
