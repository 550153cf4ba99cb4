"""Both sides as grouped bars: a row of panels per shape, a panel per number of requests."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from records import Cell, label

from peagle.cli.curves import STYLE

SIDES = {"peagle": "#39558c", "peagle, K by load": "#8fa6cf", "vLLM": "#d9a441"}
WIDTH = 0.27
"""Width of a bar; groups are 1 apart."""
HEADROOM = 1.16
"""Height of the axis over the tallest bar's, for the ratio above it."""


def draw(cells: Sequence[Cell], caption: str, path: Path) -> None:
    """Output tokens per second of every cell; above each of ours, its ratio to vLLM's."""
    shapes = list(dict.fromkeys(cell.match.shape for cell in cells))
    levels = sorted({cell.concurrency for cell in cells})
    groups = max(len({c.match for c in cells if c.match.shape == shape}) for shape in shapes)
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "y"}):
        size = (3.4 * len(levels) + 0.6, 2.7 * len(shapes) + 0.9)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(shapes), len(levels), squeeze=False)
        for row, shape in zip(panels, shapes, strict=True):
            for axes, level in zip(row, levels, strict=True):
                here = (shape, level)
                _panel(axes, [c for c in cells if (c.match.shape, c.concurrency) == here], groups)
                axes.set_title(f"{shape}, {level} request{'s' * (level > 1)} in flight")
            row[0].set_ylabel("output tokens/s")
        handles = [Patch(color=color, label=name) for name, color in SIDES.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=3)
        figure.supxlabel(textwrap.fill(caption, int(size[0] * 18)), fontsize=7, x=0.01, ha="left")
        figure.savefig(path, format="png", dpi=150)


def _panel(axes: Axes, cells: Sequence[Cell], groups: int) -> None:
    for place, cell in enumerate(cells):
        for color, offset, speed in zip(SIDES.values(), (-1, 0, 1), _speeds(cell), strict=True):
            at = place + offset * WIDTH
            axes.bar(at, speed or 0, WIDTH * 0.94, color=color)
            if speed is None and offset:
                axes.annotate(" no figure", (at, 0), ha="center", va="bottom", rotation=90)
            ratio = cell.ratio(speed)
            if ratio is not None and offset < 1:
                _above(axes, (at, speed or 0), f"{ratio:.2f}")
    axes.set_xticks(range(len(cells)), [_tick(cell) for cell in cells])
    axes.set_xlim(-0.6, groups - 0.4)
    fastest = max((speed or 0 for cell in cells for speed in _speeds(cell)), default=0)
    axes.set_ylim(0, HEADROOM * (fastest or 1))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _speeds(cell: Cell) -> tuple[float | None, ...]:
    """Speeds in the order of `SIDES`; K by load is measured only with many in flight."""
    return cell.ours, cell.by_load, cell.theirs


def _above(axes: Axes, at: tuple[float, float], text: str) -> None:
    how = {"ha": "center", "fontsize": 6}
    axes.annotate(text, at, (0, 2), textcoords="offset points", **how)


def _tick(cell: Cell) -> str:
    name, _, drafts = label(cell.match).partition(", ")
    return "\n".join((name.replace("no speculation", "none"), *drafts.split(", ")))
