"""How many threads compute a step, from times that were recorded or follow a rule."""

import os
from collections.abc import Callable

import pytest
import tiny
import torch

from peagle.cli.options import use_threads
from peagle.config import SamplingParams
from peagle.engine.thread_count import ThreadCount

CORES = 16
ALONE = {1: 10.9e-3, 2: 6.4e-3}
"""Seconds of a cycle by threads, on two cores."""
BESIDE = {1: 0.070, 2: 0.223}
"""The same beside programs that want both cores."""


def seconds(threads: ThreadCount, cost: Callable[[int, int], float], steps: int) -> float:
    """Of so many steps. cost: of a step, by threads and rows."""
    spent = 0.0
    for step in range(steps):
        rows = (8, 1, 8, 4)[step % 4]
        took = cost(threads.now, rows)
        threads.took(rows, took)
        spent += took
    return spent


def recorded(times: dict[int, float]) -> Callable[[int, int], float]:
    return lambda threads, rows: times[threads] * (1 + rows / 16)


def sixteen_cores(others: int) -> Callable[[int, int], float]:
    """Threads that find a core each share the work; where one does not, all wait for it."""
    return lambda threads, rows: rows / threads * (8 if threads > CORES - others else 1)


def test_alone_looks_at_fewer_threads_cost_less_than_a_hundredth():
    threads = ThreadCount(2)
    cost = recorded(ALONE)
    all_threads = sum(cost(2, rows) for rows in (8, 1, 8, 4)) * 1000
    assert seconds(threads, cost, 4000) < 1.01 * all_threads


def test_beside_a_busy_program_one_thread_is_found_at_once_and_kept():
    threads = ThreadCount(2)
    cost = recorded(BESIDE)
    seconds(threads, cost, 12)
    assert threads.now == 1
    one_thread = sum(cost(1, rows) for rows in (8, 1, 8, 4)) * 250
    assert seconds(threads, cost, 1000) < 1.05 * one_thread


def test_it_follows_a_program_that_comes_and_goes():
    threads = ThreadCount(2)
    seconds(threads, recorded(ALONE), 400)
    seconds(threads, recorded(BESIDE), 400)
    assert seconds(threads, recorded(BESIDE), 100) < 1.1 * seconds(
        ThreadCount(1), recorded(BESIDE), 100
    )
    seconds(threads, recorded(ALONE), 2000)
    assert seconds(threads, recorded(ALONE), 100) < 1.1 * sum(
        recorded(ALONE)(2, rows) * 25 for rows in (8, 1, 8, 4)
    )


@pytest.mark.parametrize(("others", "fewest"), [(0, 14), (2, 14), (4, 12), (9, 7), (15, 1)])
def test_of_many_cores_as_many_are_used_as_are_free(others: int, fewest: int):
    threads = ThreadCount(14)
    seconds(threads, sixteen_cores(others), 4000)
    found = seconds(threads, sixteen_cores(others), 1000)
    best = sum(sixteen_cores(others)(fewest, rows) for rows in (8, 1, 8, 4)) * 250
    assert found < 1.1 * best


def test_one_slow_step_changes_nothing_for_long():
    threads, cost = ThreadCount(2), recorded(ALONE)
    seconds(threads, cost, 1000)
    threads.took(8, 0.5)
    assert seconds(threads, cost, 400) < 1.03 * sum(cost(2, r) for r in (8, 1, 8, 4)) * 100


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("device", [False, True])
def test_an_engine_tries_fewer_threads_unless_their_number_is_named(targets, two_threads, device):
    def used() -> set[int]:
        """Threads of the steps of some requests."""
        config = tiny.engine_config(max_num_seqs=2)
        engine = tiny.engine(targets["easy"].decoder, None, 0, device, config)
        exchange, seen = engine.worker.exchange, set()

        def spied(step):
            seen.add(torch.get_num_threads())
            return exchange(step)

        engine.worker.exchange = spied
        tiny.run(engine, [[1, 2, 3]], SamplingParams(max_tokens=30, ignore_eos=True))
        return seen

    use_threads(None)
    assert used() == {1, 2}
    assert torch.get_num_threads() == 2  # for whatever else runs in the process
    use_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == "2"  # as an engine's process sees it
    assert used() == {2}
