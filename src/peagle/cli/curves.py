"""The curves of a training run: loss, accuracy of every depth, acceptance length."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DARK, LIGHT, ACCENT, INK = "#0b3c5d", "#9cc9e8", "#d1495b", "#33383d"
LOSSES = {"kl": "KL divergence (nats)", "cross_entropy": "cross-entropy (nats)"}
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6e8",
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3,
}


def draw_curves(entries: Sequence[dict[str, Any]], loss: str, path: Path) -> None:
    """Draw a run's log to a PNG, in one rename, so that a viewer never sees half of it."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        evaluations = [entry for entry in entries if entry["accuracy"] is not None]
        _draw_loss(left, entries, LOSSES[loss])
        _draw_accuracy(middle, evaluations)
        _draw_acceptance_length(right, evaluations)
        scratch = path.with_name(path.name + ".part")
        figure.savefig(scratch, format="png", dpi=150)
    os.replace(scratch, path)


def _draw_loss(axes: "Axes", entries: Sequence[dict[str, Any]], name: str) -> None:
    axes.plot([e["step"] for e in entries], [e["loss"] for e in entries], color=DARK)
    axes.set(title="Training loss", xlabel="step", ylabel=name, xlim=(0, None), ylim=(0, None))


def _draw_accuracy(axes: "Axes", evaluations: Sequence[dict[str, Any]]) -> None:
    """One line a depth, the deeper the lighter."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("depths", (DARK, LIGHT))
    steps, depths = [e["step"] for e in evaluations], len(evaluations[-1]["accuracy"])
    for depth in range(depths):
        shares = [100 * e["accuracy"][depth] for e in evaluations]
        color = shades(depth / max(depths - 1, 1))
        axes.plot(steps, shares, marker="o", color=color, label=str(depth))
    axes.set(title="Agreement with the target, held out", xlabel="step", ylabel="elements (%)")
    axes.set(xlim=(0, None), ylim=(0, 100))
    axes.legend(title="depth", loc="upper left", bbox_to_anchor=(1, 1), handlelength=1.2)


def _draw_acceptance_length(axes: "Axes", evaluations: Sequence[dict[str, Any]]) -> None:
    lengths = [e["acceptance_length"] for e in evaluations]
    best = max(range(len(lengths)), key=lengths.__getitem__)
    step = evaluations[best]["step"]
    axes.plot([e["step"] for e in evaluations], lengths, marker="o", color=DARK)
    axes.plot(step, lengths[best], "o", color=ACCENT, markersize=7)
    label = f"best {lengths[best]:.2f}, step {step:,}"
    axes.set_title(label, loc="right", color=ACCENT, fontsize=9)
    axes.set(title="Acceptance length, estimated", xlabel="step", ylabel="tokens per cycle")
    axes.set(xlim=(0, None), ylim=(1, None))
