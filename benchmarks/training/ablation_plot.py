"""The ablations as a picture: our acceptance lengths beside the paper's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from peagle.cli.curves import STYLE

OURS, PAPERS = "#39558c", ("#d1495b", "#e8a33d")
SETS = ("paper, HumanEval", "paper, MT-Bench")
HEIGHT = 0.36
"""Inches per line."""


def draw_studies(
    studies: Mapping[str, Sequence[Any]], found: Mapping[str, dict[str, Any]], path: Path
) -> None:
    """One panel per study, one line per choice: our AL with its interval, the paper's as dots."""
    shown = {
        title: [c for c in choices if c.arm.name in found] for title, choices in studies.items()
    }
    shown = {title: choices for title, choices in shown.items() if len(choices) > 1}
    lines = [len(choices) + 2 for choices in shown.values()]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, HEIGHT * sum(lines) + 0.6), layout="constrained")
        panels = figure.subplots(len(shown), 1, sharex=True, height_ratios=lines, squeeze=False)
        for axes, (title, choices) in zip(panels[:, 0], shown.items(), strict=True):
            _draw_study(axes, choices, found)
            axes.set_title(title)
        panels[-1, 0].set_xlabel("acceptance length at K = 5, tokens per cycle")
        handles, labels = max(
            (axes.get_legend_handles_labels() for axes in panels[:, 0]),
            key=lambda pair: len(pair[1]),
        )
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        figure.savefig(path, dpi=150)


def _draw_study(axes: Axes, choices: Sequence[Any], found: Mapping[str, dict[str, Any]]) -> None:
    places = range(len(choices))
    results = [found[choice.arm.name] for choice in choices]
    lengths = [result["acceptance_length"] for result in results]
    sides = zip(*(result["interval"] for result in results), strict=True)
    errors = [[abs(a - b) for a, b in zip(side, lengths, strict=True)] for side in sides]
    axes.errorbar(lengths, places, xerr=errors, fmt="o", color=OURS, label="here, held out")
    for index, (label, color) in enumerate(zip(SETS, PAPERS, strict=True)):
        said = [(choice.paper or (None, None))[index] for choice in choices]
        if None not in said:
            axes.plot(said, places, "D", color=color, alpha=0.8, label=label)
    axes.set_yticks(places, [choice.label for choice in choices])
    axes.set_ylim(len(choices) - 0.5, -0.5)
