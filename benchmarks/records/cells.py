"""The figures that a table's cell may show, by name, of one run or row among all results."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from typing import Any

from peagle.bench.case import OURS
from peagle.bench.pair import NAMES
from peagle.bench.verdict import Ratio, compare
from peagle.errors import InputError
from records.bench import drawn_runs
from records.result import Result, Row, Run
from records.store import Results

NOT_RUN, UNTOLD = "not run", "\u2013"
"""In the place of a peer's figure that no result holds, and of another one."""


@dataclass(frozen=True)
class Entry:
    """A run or a row, and the result that it is of."""

    name: str
    """The result's name."""
    result: Result
    of: Run | Row

    def tells(self, wanted: Mapping[str, Any]) -> bool:
        """Whether it has given values: its own, its result's, or the setting's."""
        return all(self._value(name) == value for name, value in wanted.items())

    def _value(self, name: str) -> Any:
        places = (
            self.of if isinstance(self.of, dict) else self.of.__dict__,
            {"result": self.name, "device": self.result.machine.device},
            {"row": isinstance(self.of, dict)},
            self.result.__dict__,
            self.result.setting,
        )
        return next((place[name] for place in places if name in place), None)


def entries(results: Results) -> Iterator[Entry]:
    """Every run and row of the results that hold today."""
    for name, result in results.items():
        if result.superseded_by is None:
            yield from (Entry(name, result, run) for run in result.runs)
            yield from (Entry(name, result, row) for row in result.rows)


def find(results: Results, wanted: Mapping[str, Any]) -> Entry | None:
    """The one run or row that has given values; ours where no side is given.

    Raises `InputError` where several have them.
    """
    sides = {"side": OURS} if "side" not in wanted else {}
    found = [
        one
        for one in entries(results)
        if one.tells(wanted) and (isinstance(one.of, dict) or one.tells(sides))
    ]
    if len(found) > 1:
        names = ", ".join(dict.fromkeys(one.name for one in found))
        raise InputError(f"{len(found)} figures of {names} fit {dict(wanted)}; ask for one of them")
    return found[0] if found else None


def filled(template: str, entry: Entry, results: Results) -> str:
    """A template with the figures of a run or row: "{speed} ({spread})"."""
    if isinstance(entry.of, dict):
        return _row_cell(template, entry.of, entry.result)
    return template.format_map(_Named(RunFigures(entry, entry.of, results)))


@dataclass(frozen=True)
class RunFigures:
    """Figures of a run; those that are not there are None."""

    entry: Entry
    run: Run
    results: Results

    def speed(self) -> str | None:
        """Median tokens per second: "953"."""
        return number(self.run.speed) if self.run.speed else None

    def timed(self) -> str | None:
        """Median tokens per second with the slowest and the fastest round: "953 (910-1,009)"."""
        return _timed(self.run)

    def rounds(self) -> str | None:
        """Every round's tokens per second."""
        return ", ".join(map(number, self.run.rounds)) or None

    def accepted(self) -> str | None:
        """The acceptance length with its 95 %: "5.40 (4.89-5.95)"."""
        return _bounded(self.run.acceptance_length, self.run.acceptance_length_interval)

    def al(self) -> str | None:
        """The acceptance length."""
        return _bounded(self.run.acceptance_length, None)

    def cycle(self) -> str | None:
        """Tokens per cycle, those without drafts included."""
        return _bounded(self.run.tokens_per_cycle, None)

    def ttft(self) -> str | None:
        """The median time to the first token in milliseconds."""
        return number(self.run.ttft_ms.p50) if self.run.ttft_ms else None

    def step(self) -> str | None:
        """The mean time between a stream's events in milliseconds."""
        return number(self.run.mean_step_ms) if self.run.mean_step_ms else None

    def same(self) -> str | None:
        """Whether the text was the same as without speculation."""
        return {True: "yes", False: "no", None: None}[self.run.same_text]

    def gained(self) -> str | None:
        """Times as fast as no speculation with the 95 % of six rounds: "2.39x (2.25-2.44)"."""
        gain = self._gain
        return None if gain is None else _times(gain.median, gain if gain.bounded else None)

    def peer(self) -> str | None:
        """The peer's speed with the same method and K in the same result, as `timed`."""
        return _timed(self._peer)

    def peer_rounds(self) -> str | None:
        """Every round's speed of the peer."""
        return ", ".join(map(number, self._peer.rounds)) if self._peer else None

    def peer_ttft(self) -> str | None:
        """The peer's median time to the first token in milliseconds."""
        return number(self._peer.ttft_ms.p50) if self._peer and self._peer.ttft_ms else None

    def peer_step(self) -> str | None:
        """The peer's mean time between a stream's events in milliseconds."""
        return number(self._peer.mean_step_ms) if self._peer and self._peer.mean_step_ms else None

    def peer_ratio(self) -> str | None:
        """Our median over the peer's."""
        return self._over(self._peer, statistics.median_low)

    def peer_ratio_least(self) -> str | None:
        """Our median over the peer's fastest round."""
        return self._over(self._peer, max)

    def peer_ratios(self) -> str | None:
        """Our speed over the peer's, round by round."""
        if self._peer is None:
            return None
        pairs = zip(self.run.rounds, self._peer.rounds, strict=True)
        return ", ".join(f"{ours / theirs:.2f}" for ours, theirs in pairs)

    def peer_best(self) -> str | None:
        """The peer's fastest way under this load, of any method and K, and its speed."""
        return f"{label(self._best)}: {_timed(self._best)}" if self._best else None

    def peer_best_ratio(self) -> str | None:
        """Our median over that of the peer's fastest way."""
        return self._over(self._best, statistics.median_low)

    @cached_property
    def _gain(self) -> Ratio | None:
        """Over ours without speculation, by the rule of reports."""
        same = ("data", "concurrency", "request_rate", "temperature")
        setting = self.run.setting if self.run.side == OURS else ""
        drawn = dict(zip(map(id, self._with_speed), drawn_runs(self.entry.result), strict=True))
        plain = [
            one
            for one in self._with_speed
            if (one.side, one.method, one.setting) == (OURS, "none", setting)
            and _alike(one, self.run, same)
        ]
        if not plain or not self.run.rounds:
            return None
        return compare(drawn[id(self.run)], drawn[id(plain[0])])

    @property
    def _with_speed(self) -> list[Run]:
        return [run for run in self.entry.result.runs if run.rounds]

    @cached_property
    def _peer(self) -> Run | None:
        same = ("data", "method", "k", "concurrency", "request_rate", "temperature")
        found = [
            run for run in self._with_speed if run.side != OURS and _alike(run, self.run, same)
        ]
        return max(found, key=lambda run: run.speed or 0, default=None)

    @cached_property
    def _best(self) -> Run | None:
        about = {"claim": self.entry.result.claim, "device": self.entry.result.machine.device}
        same = ("data", "concurrency", "request_rate", "temperature")
        runs = [e.of for e in entries(self.results) if e.tells(about) and isinstance(e.of, Run)]
        found = [r for r in runs if r.side != OURS and r.rounds and _alike(r, self.run, same)]
        return max(found, key=lambda run: run.speed or 0, default=None)

    def _over(self, other: Run | None, of: Callable[[Sequence[float]], float]) -> str | None:
        if other is None or self.run.speed is None:
            return None
        return _times(self.run.speed / of(other.rounds), None)


class _Named(dict[str, str]):
    """A run's figures by the names of their methods."""

    def __init__(self, figures: RunFigures) -> None:
        self._figures = figures

    def __missing__(self, name: str) -> str:
        figure = getattr(self._figures, name, None)
        if name.startswith("_") or not callable(figure):
            raise InputError(f"a run has no figure {name}")
        value: str | None = figure()
        missing = NOT_RUN if name.startswith("peer") else UNTOLD
        return missing if value is None else value


def label(run: Run) -> str:
    """How a run drafted: "P-EAGLE, K = 7"."""
    if not run.k:
        return "no speculation"
    sign = "=" if run.draft_length == "fixed" else "≤"
    return f"{NAMES.get(run.method, run.method)}, K {sign} {run.k}"


def number(value: float) -> str:
    """Three digits or more, thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _alike(one: Run, other: Run, names: Sequence[str]) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _timed(run: Run | None) -> str | None:
    if run is None or not run.speed:
        return None
    least, most = number(min(run.rounds)), number(max(run.rounds))
    return f"{number(run.speed)} ({least}\u2013{most})" if len(run.rounds) > 1 else least


def _bounded(value: float | None, bounds: tuple[float, float] | None) -> str | None:
    if value is None:
        return None
    return f"{value:.2f} ({bounds[0]:.2f}\u2013{bounds[1]:.2f})" if bounds else f"{value:.2f}"


def _times(ratio: float, bounds: Ratio | None) -> str:
    between = f" ({bounds.low:.2f}\u2013{bounds.high:.2f})" if bounds and ratio != 1 else ""
    return f"{ratio:.2f}\u00d7{between}"


def _row_cell(template: str, row: Row, result: Result) -> str:
    """A template with a row's columns; `UNTOLD` where this row lacks one that others have."""
    asked = {name for _, name, _, _ in Formatter().parse(template) if name}
    for name in asked - {column for one in result.rows for column in one}:
        raise InputError(f"no row of {result.measured} has {name}")
    known = {name: value for name, value in row.items() if value is not None}
    return template.format_map(known) if asked <= known.keys() else UNTOLD
