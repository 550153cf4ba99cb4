"""What a report says, block after block."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.bench.advice import Advice, Price, advise
from peagle.bench.case import Case, Load
from peagle.bench.measures import NOT_MEASURED
from peagle.bench.report.document import (
    Block,
    Cell,
    Counsel,
    Page,
    Plots,
    Row,
    SectionTitle,
    Table,
    Tables,
    Text,
)
from peagle.bench.report.plots import draw_plots
from peagle.bench.runs import Failure, Run
from peagle.bench.tables import (
    branching_text,
    case_text,
    length_text,
    ratio_text,
    same_text,
    varying_text,
)
from peagle.bench.verdict import bounded, by_load, doubts, grouped, reference, speed_up
from peagle.files import read_yaml

SHOWN = 3
"""Settings of many that a sentence names."""
HOW: dict[str, str] = read_yaml(Path(__file__).with_name("how.yaml"))
"""How figures were measured, and what their names mean."""


def contents(
    environment: Mapping[str, Any],
    runs: Sequence[Run],
    notes: Sequence[str],
    failures: Sequence[Failure],
    price: Price,
    command: str,
) -> Page:
    """The report on median runs, at least one."""
    advice = [advise(same) for same in by_load(runs).values()]
    first, synthetic = runs[0].case, environment.get("synthetic")
    doubted = [f"Do not rely on these figures: {doubt}." for doubt in doubts(runs)]
    return Page(
        _title(environment, first),
        [
            *(Text(note, warns=True) for note in (*doubted, synthetic, *notes) if note),
            SectionTitle("What to use"),
            *map(_decision, advice),
            *_cost(advice, price),
            *_data_sets(runs),
            *_failed(failures),
            *what_ran(environment),
            SectionTitle("How it was measured"),
            Text(" ".join((HOW["processes" if first.engine else "turns"], HOW["terms"]))),
            *(Text(told) for told in (branching_text(runs), varying_text(runs)) if told),
            Text(f"Made by: {command}"),
        ],
    )


def _title(environment: Mapping[str, Any], first: Case) -> str:
    """What was measured: of which target, on what, and when."""
    what = "Servers" if first.is_server else "Engines" if first.engine else "Speculative decoding"
    about = {name: str(value) for name, value in environment.items()}
    target = about.get("shape") or Path(about.get("target", "")).name
    device = about.get("device", "")
    place = about.get("cpu", "") if device == "cpu" else device
    told = ", ".join(filter(None, (target, place, about.get("date", "").partition("T")[0])))
    return f"{what} measured" + (f": {told}" if told else "")


def _decision(one: Advice) -> Counsel:
    """What to use under one load."""
    chosen = one.choice
    others = [run.case.label for run in (one.fastest, *one.others) if run is not chosen]
    engines = bool(chosen.case.engine)  # whose ratios have no intervals
    few = bool(others) and not engines and not bounded(len(chosen.rounds))
    told = f"{_number(chosen.measures.otps)} tokens/s"
    if one.gain is None or one.reference is None:
        ahead = any(run.measures.otps > chosen.measures.otps for run in one.compared)
        told += "; nothing is clearly faster" if ahead else ", the fastest"
    elif one.clear or engines or few:
        told += f", {ratio_text(one.gain)} over {one.reference.case.label}"
    else:
        told += f"; no gain is sure: {one.fastest.case.label} was {ratio_text(one.gain)}"
    told += ", in too few rounds to be sure." if few else "."
    if others and not engines and not few:
        told += f" Not clearly slower: {_few(others)}."
    return Counsel(_sentence(one.load.words), chosen.case.label, told, one.clear)


def _few(labels: Sequence[str]) -> str:
    more = f"; and {len(labels) - SHOWN} more" if len(labels) > SHOWN else ""
    return "; ".join(labels[:SHOWN]) + more


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cost(advice: Sequence[Advice], price: Price) -> Iterator[Block]:
    """What the advice costs, if a price or a rate is given."""
    if price.per_hour is None and price.target_rate is None:
        return
    head = ["load", "setting"]
    told = []
    if price.per_hour is not None:
        head += ["M tokens/$", "$/M tokens"]
        told.append(
            f"Tokens for a dollar: the machine at ${price.per_hour:g} an hour, always busy."
        )
    if price.target_rate is not None:
        head.append("machines")
        told.append(f"Machines: as many of this one as give {price.target_rate:,.0f} tokens/s.")
    yield SectionTitle("What it costs")
    yield Text(" ".join(told))
    loads = [one.load for one in advice]
    rows = [_cost_row(_short(one.load, loads), r, price) for one in advice for r in one.compared]
    yield Table(head, rows, keys=2)


def _short(load: Load, loads: Sequence[Load]) -> str:
    """A load's name, with its prompts and temperature where these differ."""
    told = [load.labelled]
    if len({other.data for other in loads}) > 1:
        told.append(load.data)
    if len({other.temperature for other in loads}) > 1:
        told.append(f"T = {load.temperature:g}")
    return ", ".join(told)


def _cost_row(load: str, run: Run, price: Price) -> Row:
    otps = run.measures.otps
    row = [load, run.case.label]
    tokens = price.tokens_per_dollar(otps)
    if tokens is not None:
        row += [f"{tokens / 1e6:.2f}", f"{1e6 / tokens:.2f}"]
    machines = price.machines(otps)
    if machines is not None:
        row.append(f"{machines:,}")
    return row


def _data_sets(runs: Sequence[Run]) -> Iterator[Block]:
    """A section for each set of prompts and temperature."""
    sections = grouped(runs, lambda run: (run.case.data, run.case.temperature))
    for number, ((data, temperature), same) in enumerate(sections.items(), start=1):
        yield SectionTitle(data if temperature == 0.0 else f"{data}, temperature {temperature:g}")
        yield _grid(same)
        if plots := list(draw_plots(same, f"plot{number}")):
            yield Plots(plots)
        yield _sureness(same)
        if any(run.measures.acceptance_rate_per_position for run in same):
            yield _acceptance(same)
        yield Tables("Latencies", [table for kind in LATENCIES for table in _latency(same, *kind)])


def _grid(runs: Sequence[Run]) -> Table:
    """Settings by loads: tokens/s, speed-up and AL."""
    loads = sorted(by_load(runs))
    labels = list(dict.fromkeys(run.case.label for run in runs))
    found = {(run.case.label, run.case.load): run for run in runs}
    best = {load: advise(same).fastest for load, same in by_load(runs).items()}
    rows = [
        [label, *(_grid_cell(found.get((label, load)), runs, best[load]) for load in loads)]
        for label in labels
    ]
    return Table(("setting", *(load.labelled for load in loads)), rows, "Tokens/s, speed-up and AL")


def _grid_cell(run: Run | None, runs: Sequence[Run], best: Run) -> str | Cell:
    if run is None:
        return "-"
    ratio = speed_up(run, runs)
    lines = [_number(run.measures.otps)]
    lines += [f"{ratio.median:.2f}x"] if ratio is not None else []
    lines += [f"AL {length_text(run)}"] if run.measures.acceptance_length is not None else []
    gain = max(ratio.median - 1.0, 0.0) if ratio is not None else 0.0
    return Cell(tuple(lines), min(gain / 2.0, 1.0), run is best)


def _sureness(runs: Sequence[Run]) -> Table:
    """How far rounds differ."""
    rows = [
        (
            run.case.label,
            run.case.load.shown,
            f"{_number(min(run.rounds))}-{_number(max(run.rounds))}",
            _gain_text(run, runs),
            _length_text(run),
            same_text(run, runs),
        )
        for run in runs
    ]
    head = ("setting", "C", "tokens/s", "speed-up", "AL", "same text")
    rounds = max(len(run.rounds) for run in runs)
    intervals = ", and 95 % intervals" if bounded(rounds) else ""
    return Table(head, rows, f"How sure: the least and the most of {rounds} rounds{intervals}")


def _number(value: float) -> str:
    """With three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _gain_text(run: Run, runs: Sequence[Run]) -> str:
    ratio = speed_up(run, runs)
    return "-" if ratio is None or reference(run, runs) is run else ratio_text(ratio)


def _length_text(run: Run) -> str:
    """AL and its interval."""
    length, bounds = run.measures.acceptance_length, run.measures.acceptance_length_interval
    if length is None:
        return "-"
    return f"{length:.2f}" + (f" ({bounds[0]:.2f}-{bounds[1]:.2f})" if bounds else "")


def _acceptance(runs: Sequence[Run]) -> Table:
    """Share of cycles that accept draft 1, 2, ..., in percent; equal rows of a setting once."""
    told = {(run.case.label, run.measures.acceptance_rate_per_position): run for run in runs[::-1]}
    shown = [run for run in list(told.values())[::-1] if run.measures.acceptance_rate_per_position]
    most = max(len(run.measures.acceptance_rate_per_position) for run in shown)
    rows = [
        (
            run.case.label,
            run.case.load.shown,
            *(f"{100 * rate:.0f}" for rate in run.measures.acceptance_rate_per_position),
            *[""] * (most - len(run.measures.acceptance_rate_per_position)),
        )
        for run in shown
    ]
    head = ("setting", "C", *(str(place) for place in range(1, most + 1)))
    return Table(head, rows, "Draft 1, 2, … accepted, % of cycles")


LATENCIES = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))


def _latency(runs: Sequence[Run], name: str, field: str) -> Iterator[Table]:
    """The latency of those for which it was measured, if any."""
    found = [(run.case, getattr(run.measures, field)) for run in runs]
    rows = [
        (case.label, case.load.shown, *map(_number, (times.p50, times.p95, times.p99)))
        for case, times in found
        if times != NOT_MEASURED
    ]
    if rows:
        yield Table(("setting", "C", "p50", "p95", "p99"), rows, f"{name}, ms")


def _failed(failures: Sequence[Failure]) -> Iterator[Block]:
    """Cases without figures, and why."""
    if failures:
        yield SectionTitle("What failed")
        rows = [(case_text(one.case), Cell(tuple(one.reason.splitlines()))) for one in failures]
        yield Table(("setting", "why"), rows, prose=True)


def what_ran(environment: Mapping[str, Any]) -> list[Block]:
    """What figures depend on."""
    facts = Table(("what", "value"), list(_facts(environment)), prose=True)
    return [SectionTitle("What ran where"), facts]


def _facts(environment: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values, those of groups after their group's name."""
    for name, value in environment.items():
        shown = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _facts(value, f"{name}: ")
        elif isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
            for number, one in enumerate(value, start=1):
                told = ", ".join(str(v) for v in one.values() if v)
                yield f"{shown.removesuffix('s')} {number}", told
        elif value not in (None, ""):
            yield shown, str(value)
