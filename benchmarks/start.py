"""How long an engine takes to start, and what it keeps of the card for its graphs, by its seats.

    python benchmarks/start.py --shape qwen3-8b --method peagle --seats 64,512 --out start.json

Random weights; each number of seats has a process of its own, twice: the first start of a machine
also compiles kernels. Memory is the card's, as the driver tells it.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import typer

from peagle.bench.random_weights import random_target
from peagle.bench.shapes import random_proposer, shape_of
from peagle.cli.script import run
from peagle.config import EngineConfig
from peagle.engine.device.worker import DeviceWorker
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peers import card
from peers.trials import METHODS
from records.measuring import begun, written
from records.result import Row

GIB = 2**30
UNITS = {
    "seconds": "s",
    "capturing_seconds": "s",
    "graphs_gib": "GiB",
    "cache_slots": "positions",
}


@dataclass(frozen=True)
class Start:
    """One start of an engine whose models are loaded."""

    seats: int
    seconds: float
    """Until it takes requests."""
    capturing_seconds: float
    """Of these, for graphs and their times."""
    graphs_gib: float
    """What capturing took of the card's memory."""
    cache_slots: int
    """Positions that the key-value caches have room for, over all groups of layers."""


def main(
    shape: Annotated[str, typer.Option(help="A shape of peagle bench.")] = "qwen3-8b",
    method: Annotated[str, typer.Option(help="none, peagle or eagle3.")] = "peagle",
    seats: Annotated[
        str, typer.Option(help="Numbers of requests that may run at once.")
    ] = "64,512",
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Print a line for each start."""
    if not torch.cuda.is_available():
        raise InputError("it is a GPU's graphs that are measured; none is here")
    measured = f"How long an engine of {shape} takes to start, {method}, random weights"
    about = begun(measured, card.reading())
    rows: list[Row] = []
    with written(out, about, UNITS, shape=shape, method=method) as write:
        for count in map(int, seats.split(",")):
            for number in (1, 2):
                spawning = multiprocessing.get_context("spawn")
                with ProcessPoolExecutor(1, spawning) as process:
                    found = process.submit(started, shape, method, count).result()
                print(found, flush=True)
                rows.append({"start": number, **asdict(found)})
                write(rows)


def started(shape: str, method: str, seats: int) -> Start:
    """Start an engine with K by load, as `peagle serve` does."""
    k, found = METHODS[method][0], shape_of(shape)
    where = torch.device("cuda"), torch.bfloat16
    target = random_target(found.target, *where, found.weights)
    drafter = random_proposer(found, method, target)
    took: list[tuple[float, int]] = []
    begun = time.perf_counter()
    with mock.patch.object(DeviceWorker, "capture", _measured(took)):
        engine = Engine(target, drafter, k, EngineConfig(max_num_seqs=seats))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    [(capturing, held)] = took
    slots = engine.blocks.num_blocks * engine.blocks.block_size
    return Start(seats, seconds, capturing, held / GIB, slots)


def _measured(took: list[tuple[float, int]]) -> Callable[[DeviceWorker], None]:
    """The worker's `capture`, which then notes its seconds and bytes."""
    capture = DeviceWorker.capture

    def measured(worker: DeviceWorker) -> None:
        torch.cuda.synchronize()
        free, begun = torch.cuda.mem_get_info()[0], time.perf_counter()
        capture(worker)
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begun, free - torch.cuda.mem_get_info()[0]))

    return measured


if __name__ == "__main__":
    run(main)
