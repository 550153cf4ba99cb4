"""The curves of a training run: loss, accuracy of every depth, acceptance length."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.cli.verdict import HELPS, WORTH_SERVING
from peagle.files import replacing
from peagle.plot_style import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEPTHS, SHALLOW, DEEP = "viridis", 0.15, 0.92
"""Colours of the depths, from depth 0 to the deepest."""
LINE, BEST = "#39558c", "#d1495b"
LOSSES = {"kl": "KL divergence (nats)", "cross_entropy": "cross-entropy (nats)"}
EVALUATED, DRAWN = "o-", "--"
"""How what holds for greedy answers is drawn, and what holds at temperature 1."""
OWN_STYLE: dict[Any, Any] = {"grid.linewidth": 0.7, "lines.linewidth": 1.4, "lines.markersize": 3}


def draw_curves(entries: Sequence[dict[str, Any]], loss: str, path: Path) -> None:
    """Draw the entries of a run's log, at least one of them an evaluation.

    The PNG appears in one rename, so that a viewer never sees half of it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(OWN_STYLE, STYLE):
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        evaluations = [entry for entry in entries if entry["accuracy"] is not None]
        _draw_loss(left, entries, LOSSES[loss])
        _draw_accuracy(middle, evaluations)
        _draw_acceptance_length(right, evaluations)
        with replacing(path) as scratch:
            figure.savefig(scratch, format="png", dpi=150)


def _draw_loss(axes: "Axes", entries: Sequence[dict[str, Any]], name: str) -> None:
    axes.plot([e["step"] for e in entries], [e["loss"] for e in entries], color=LINE)
    axes.set(title="Training loss", ylabel=name, ylim=(0, None))
    _measure_steps(axes)


def _draw_accuracy(axes: "Axes", evaluations: Sequence[dict[str, Any]]) -> None:
    from matplotlib import colormaps

    steps, deepest = [e["step"] for e in evaluations], len(evaluations[-1]["accuracy"]) - 1
    for depth in range(deepest + 1):
        color = colormaps[DEPTHS](SHALLOW + (DEEP - SHALLOW) * depth / max(deepest, 1))
        shares = [100 * e["accuracy"][depth] for e in evaluations]
        axes.plot(steps, shares, EVALUATED, color=color, label=str(depth))
        drawn = [100 * e["drawn_accuracy"][depth] for e in evaluations]
        axes.plot(steps, drawn, DRAWN, color=color)
    title = "Agreement with the target (dashed: T = 1)"
    axes.set(title=title, ylabel="elements (%)", ylim=(0, 100))
    axes.legend(title="depth", loc="upper left", bbox_to_anchor=(1, 1.05), labelspacing=0.3)
    _measure_steps(axes)


def _draw_acceptance_length(axes: "Axes", evaluations: Sequence[dict[str, Any]]) -> None:
    from matplotlib import rcParams

    best = max(evaluations, key=lambda e: e["acceptance_length"])
    step, longest = best["step"], best["acceptance_length"]
    steps, lengths = ([e[key] for e in evaluations] for key in ("step", "acceptance_length"))
    axes.plot(steps, lengths, EVALUATED, color=LINE)
    drawn = [e["drawn_acceptance_length"] for e in evaluations]
    axes.plot(steps, drawn, DRAWN, color=LINE, label="at temperature 1")
    label = f"best: {longest:.2f} at step {step:,}"
    axes.plot(step, longest, "o", color=BEST, markersize=7, label=label)
    most = len(best["accuracy"]) + 1
    for height, meaning in ((HELPS, "helps"), (WORTH_SERVING, "worth serving"), (most, "K + 1")):
        axes.axhline(height, color=rcParams["text.color"], linewidth=0.8, linestyle=":")
        axes.annotate(meaning, (0, height), (2, 2), textcoords="offset points", fontsize=7)
    title = "Acceptance length, estimated"
    axes.set(title=title, ylabel="tokens per cycle", ylim=(1, most + 0.5))
    axes.legend(loc="best", handlelength=1)
    _measure_steps(axes)


def _measure_steps(axes: "Axes") -> None:
    """Mark steps from 0, in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="step", xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
