"""Rounds in which cases take turns, so that a machine's bad moments fall on all of them."""

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from peagle.bench.case import Case, Setup
from peagle.bench.load import EngineCase, Tick, Workload, open_case
from peagle.bench.runs import Failure, Run
from peagle.errors import InputError, MemoryShortageError


class OpenCase(Protocol):
    """A case that is ready to run."""

    @property
    def case(self) -> Case:
        """What it measures."""

    def run(self, on_finish: Tick = lambda: None) -> Run:
        """Complete all requests once. Raises `InputError` where that is impossible."""


def take_turns(
    ready: Sequence[OpenCase], rounds: int, on_finish: Tick = lambda: None
) -> Iterator[Run | Failure]:
    """Run every case once a round; each run as it ends.

    Each round begins with the case after the one that the round before began with. A case that
    fails is left out from there on.
    """
    failed: set[Case] = set()
    for turn in range(rounds):
        first = turn % len(ready)
        for one in itertools.chain(ready[first:], ready[:first]):
            if one.case in failed:
                continue
            try:
                yield one.run(on_finish)
            except InputError as error:
                failed.add(one.case)
                yield Failure(one.case, str(error))


def run_engines(
    workload: Workload,
    cases: Sequence[Case],
    rounds: int,
    on_finish: Tick = lambda: None,
    warn: Callable[[str], None] = lambda _: None,
) -> Iterator[Run | Failure]:
    """Let cases take turns on engines of this process, all open at once over one target.

    Where memory does not hold them all, one engine after the other runs all rounds of its cases,
    and `warn` is told. Raises `InputError` before the first run if a prompt or an engine does not
    fit.
    """
    setups = list(dict.fromkeys(case.setup for case in cases))
    workload.load(setups)
    try:
        ready = open_cases(workload, cases)
    except (MemoryShortageError, torch.OutOfMemoryError) as error:
        refusal = InputError(str(error).partition(". ")[0])
    else:
        yield from take_turns(ready, rounds, on_finish)
        return
    if len(setups) == 1:
        raise refusal
    warn(
        f"the engines do not fit beside one another ({refusal}), so each runs all its rounds "
        "before the next one opens: a machine that slows down meanwhile slows one of them"
    )
    for setup in setups:
        give_back()
        alone = [case for case in cases if case.setup == setup]
        yield from take_turns(open_cases(workload, alone), rounds, on_finish)


def open_cases(workload: Workload, cases: Sequence[Case]) -> list[EngineCase]:
    """Every case on a warm engine, which those that differ only in their load share."""
    most: dict[Setup, int] = {}
    for case in cases:
        most[case.setup] = max(case.concurrency, most.get(case.setup, 0))
    shared = len(most) > 1
    opened = {setup: workload.open(setup, count, shared) for setup, count in most.items()}
    return [open_case(workload, opened[case.setup], case) for case in cases]


def give_back() -> None:
    """Free the memory of engines that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
