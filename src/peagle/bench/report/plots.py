"""The report's plots, as SVG that a page holds."""

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from peagle.bench.case import Load
from peagle.bench.report.document import Plot
from peagle.bench.runs import Run
from peagle.bench.verdict import grouped, reference, speed_up
from peagle.plot_style import STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, ROW = 7.6, 3.4, 0.24
"""Inches of a plot, and of each row of one that grows with its settings."""
COLOURS = ("#5b666f", "#a8281f", "#2f4f9e", "#3aa17e", "#c58bd0", "#b5791f")
"""The methods' colours, in their order; the first is no speculation's."""
STROKES = {False: ("-", "--", ":", "-."), True: (":", "-.")}
"""Lines of a method's settings: ours, and a peer's."""
OWN_STYLE: dict[Any, Any] = {"legend.fontsize": 8, "lines.linewidth": 1.6, "lines.markersize": 5}


def draw_plots(runs: Sequence[Run], name: str) -> Iterator[Plot]:
    """What the median runs of one data set and temperature show; name: begins the plots' names."""
    if len({run.case.load for run in runs}) > 1:
        yield _drawn(name, "speed", "Tokens per second by load", _speed, runs)
        if timed := [run for run in runs if run.measures.itl_ms.p50]:
            yield _drawn(name, "user", "Speed of one user and of all", _users, timed)
    if any(run is not reference(run, runs) for run in runs if reference(run, runs)):
        yield _drawn(name, "gain", "Speed-up, with its interval", _gains, runs)


def _drawn(
    name: str, kind: str, title: str, draw: Callable[["Axes", Sequence[Run]], None], runs: Any
) -> Plot:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(OWN_STYLE | {"svg.hashsalt": name + kind}, STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        draw(axes, runs)
        axes.set_title(title)
        handles, labels = axes.get_legend_handles_labels()
        if not handles:  # each of its rows is labelled
            figure.set_figheight(1 + ROW * len(axes.get_yticks()))
        else:
            figure.legend(handles, labels, loc="outside right upper")
        sink = io.StringIO()
        figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None})
    return Plot(f"{name}-{kind}.svg", title, sink.getvalue())


def _speed(axes: "Axes", runs: Sequence[Run]) -> None:
    """Medians, and bars from the least to the most of all rounds."""
    for label, same, style in _lines(runs):
        places = [_place(run.case.load) for run in same]
        speeds = [run.measures.otps for run in same]
        below = [run.measures.otps - min(run.rounds) for run in same]
        above = [max(run.rounds) - run.measures.otps for run in same]
        axes.errorbar(places, speeds, (below, above), capsize=2, label=_plain(label), **style)
    _measure_loads(axes, runs)
    axes.set(ylabel="output tokens/s", ylim=(0, None))


def _users(axes: "Axes", runs: Sequence[Run]) -> None:
    """Each point a load: what one user sees, and what all get together."""
    for label, same, style in _lines(runs):
        own = [1000 / run.measures.itl_ms.p50 for run in same]
        axes.plot(own, [run.measures.otps for run in same], label=_plain(label), **style)
    axes.set(xlabel="tokens/s of one request (1 / median ITL)", ylabel="tokens/s of all")
    axes.set(xlim=(0, None), ylim=(0, None))


def _gains(axes: "Axes", runs: Sequence[Run]) -> None:
    """A dot and a bar for each setting and load; the bar is there where rounds give an interval."""
    found = [(run, speed_up(run, runs)) for run in runs if reference(run, runs) is not run]
    gains = [(run, ratio) for run, ratio in found if ratio is not None]
    colours, labels = _colours(runs), []
    for place, (run, ratio) in enumerate(gains):
        labels.append(_plain(f"{run.case.label}, {run.case.load.labelled}"))
        bounds = (ratio.low, ratio.high) if ratio.bounded else (ratio.median, ratio.median)
        axes.plot(bounds, (place, place), color=colours[run.case.method], linewidth=3, alpha=0.5)
        axes.plot(ratio.median, place, "o", color=colours[run.case.method])
        end, told = (bounds[1], place), f"{ratio.median:.2f}x"
        axes.annotate(told, end, (6, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color=COLOURS[0], linewidth=1.0)
    axes.set_yticks(range(len(labels)), labels)
    axes.margins(x=0.12)
    axes.set(xlabel="times as fast as its reference", ylim=(len(labels) - 0.5, -0.5))


def _lines(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run], dict[str, Any]]]:
    """Each case's label, its runs by load, and how its line looks: a colour for each method."""
    colours = _colours(runs)
    groups = grouped(runs, lambda run: (run.case.method, run.case.is_peer))
    strokes = {group: itertools.cycle(STROKES[group[1]]) for group in groups}
    for label, same in grouped(runs, lambda run: run.case.label).items():
        method, peer = same[0].case.method, same[0].case.is_peer
        look = {"color": colours[method], "linestyle": next(strokes[method, peer]), "marker": "o"}
        look |= {"markerfacecolor": "none"} if peer else {}
        yield label, sorted(same, key=lambda run: _place(run.case.load)), look


def _colours(runs: Sequence[Run]) -> dict[str, str]:
    methods = list(dict.fromkeys(run.case.method for run in runs))
    return dict(zip(methods, itertools.cycle(COLOURS), strict=False))


def _place(load: Load) -> float:
    return load.request_rate or load.concurrency


def _measure_loads(axes: "Axes", runs: Sequence[Run]) -> None:
    rated = any(run.case.load.request_rate for run in runs)
    axes.set_xscale("log", base=2)
    places = sorted({_place(run.case.load) for run in runs})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel("requests a second" if rated else "C, requests in flight")


def _plain(name: str) -> str:
    """A label as it is: between two dollars matplotlib reads formulas."""
    return name.replace("$", r"\$")
