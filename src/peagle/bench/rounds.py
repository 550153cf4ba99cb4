"""Rounds in which cases take turns, so that a machine's bad moments fall on all of them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from peagle.bench.load import Case, OpenCase, Run, Workload, median_run, open_case


def take_turns(
    workload: Workload, cases: Sequence[Case], on_finish: Callable[[], None] = lambda: None
) -> Iterator[list[Run]]:
    """Run every case once a round, without end; yields each round's runs in the order of `cases`.

    Each round begins with the case after the one that the round before began with. The engines, one
    for each method and K, stay open until the iterator is closed. Calls `on_finish` after each
    request. Raises `InputError` before the first round if the longest prompt does not fit.
    """
    ready = _open_all(workload, cases)
    for turn in itertools.count():
        first = turn % len(ready)
        runs = [case.run(on_finish) for case in ready[first:] + ready[:first]]
        in_order = runs[len(runs) - first :] + runs[: len(runs) - first]
        yield _compared(in_order) if workload.comparable else in_order


def median_runs(rounds: Sequence[Sequence[Run]]) -> list[Run]:
    """Each case's median run; `Run.rounds` has the speeds of all rounds, in their order."""
    return [median_run(runs) for runs in zip(*rounds, strict=True)]


def _open_all(workload: Workload, cases: Sequence[Case]) -> list[OpenCase]:
    most: dict[tuple[str, int], int] = {}
    for case in cases:
        engine = (case.method, case.k)
        most[engine] = max(case.concurrency, most.get(engine, 0))
    engines = {engine: workload.open(*engine, most[engine]) for engine in most}
    return [open_case(workload, engines[case.method, case.k], case) for case in cases]


def _compared(runs: Sequence[Run]) -> list[Run]:
    """The runs of a round, each told whether it wrote what the one without speculation wrote."""
    expected = next((run.outputs for run in runs if run.case.method == "none"), None)
    if expected is None:
        return list(runs)
    return [replace(run, identical_to_none=run.outputs == expected) for run in runs]
