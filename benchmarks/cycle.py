"""Where the time of a captured cycle goes, and how near it is to reading its bytes.

    python benchmarks/cycle.py --shape qwen3-8b --method peagle --concurrency 1,8,64

Random weights, set acceptance. The bytes are those that a cycle must read (`traffic.py`); the floor
is the time to read them at the rate that this card reaches on a large copy or sum. The floor is
compared with the wall time of whole steps, host included: kernels overlap, so the sum of their
times is not a cycle's. Kernels are timed in separate steps; the card's clock and power are read
after seconds of cycles.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from launches import Kernel, grouped
from peagle.bench.case import Setup
from peagle.bench.shapes import random_prompts
from peagle.bench.synthetic import SyntheticWorkload
from peagle.cli.script import run
from peagle.config import EngineConfig, KVCacheDType, SamplingParams
from peagle.drafters.selector import SelectorConfig
from peagle.engine.engine import Engine
from peagle.engine.kv_cache import kv_dtype
from peagle.engine_client.local import LocalEngine
from peers import card
from peers.trials import METHODS
from records.measuring import begun, written
from records.result import Row
from traffic import PARTS, cycle_bytes

CANDIDATES = 16
"""Of each slot, that a selector scores again."""
WARM_UP_STEPS = 16
ROOM = 3072
"""Tokens after a prompt, more than the measured steps emit."""
SECONDS = 2.0
"""Seconds of steps before the card is read."""
BUFFER = 4 << 30
"""Bytes that are copied and summed to find the card's rate."""
MICRO, TERA = 1e6, 1e12
UNITS = {
    "wall_us": "us",
    "floor_us": "us",
    "of_floor": "share",
    "kernels_us": "us",
    "us": "us",
    "launches": "a cycle",
    "power_w": "W",
    "clock_mhz": "MHz",
    "copy_tb_per_s": "TB/s",
}


@dataclass(frozen=True)
class Cycle:
    """One steady state, measured."""

    requests: int
    positions: int
    """Cached tokens of all requests."""
    wall_us: float
    bytes: dict[str, int]
    floor_us: float
    kernels: list[Kernel]
    card: dict[str, str | float]
    """The card's reading while such cycles run."""

    @property
    def of_floor(self) -> float:
        """The floor as a share of the wall time."""
        return self.floor_us / self.wall_us

    @property
    def kernels_us(self) -> float:
        """The sum over kernels, which overlap."""
        return sum(kernel.microseconds for kernel in self.kernels)

    def rows(self, rate: float) -> Iterator[Row]:
        """The cycle, then each of its kernels."""
        key: Row = {"requests": self.requests, "tokens_cached": self.positions}
        whole = {
            **{_column(part): count / 1e6 for part, count in self.bytes.items()},
            "wall_us": self.wall_us,
            "floor_us": self.floor_us,
            "of_floor": self.of_floor,
            "kernels_us": self.kernels_us,
            "power_w": float(self.card.get("power.draw", 0)),
            "clock_mhz": float(self.card.get("clocks.sm", 0)),
            "copy_tb_per_s": rate / TERA,
        }
        yield {**key, "kernel": None, **whole}
        for one in self.kernels:
            yield {**key, "kernel": one.name, "us": one.microseconds, "launches": one.launches}


def main(
    shape: Annotated[str, typer.Option(help="A shape of peagle bench.")] = "qwen3-8b",
    method: Annotated[str, typer.Option(help="none, peagle or eagle3.")] = "peagle",
    k: Annotated[int | None, typer.Option(help="Tokens to draft.", show_default="7 or 3")] = None,
    drafts: Annotated[
        int | None, typer.Option(help="Drafts of each cycle, as if chosen by load.", min=0)
    ] = None,
    acceptance: Annotated[float | None, typer.Option(help="Acceptance length.")] = None,
    selector_rank: Annotated[int, typer.Option(help="P-EAGLE's selector; 0: none.", min=0)] = 0,
    temperature: Annotated[float, typer.Option(help="Of all requests.", min=0.0)] = 0.0,
    concurrency: Annotated[str, typer.Option(help="Numbers of requests in flight.")] = "1,8,64",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 512,
    kv_cache_dtype: Annotated[KVCacheDType, typer.Option(help="As of peagle serve.")] = "auto",
    steps: Annotated[int, typer.Option(help="Steps to time, and steps to profile.")] = 20,
    top: Annotated[int, typer.Option(help="Kernels to list.")] = 12,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Measure and print one breakdown for each number of requests."""
    levels = [int(level) for level in concurrency.split(",")]
    usual = METHODS[method]
    most, length = usual[0] if k is None else k, acceptance or usual[1]
    asked: Row = {
        "shape": shape,
        "method": method,
        "k": most,
        "drafts": drafts,
        "selector_rank": selector_rank,
        "sampled": temperature > 0,
        "kv_cache_dtype": kv_cache_dtype,
    }
    about = begun(f"Captured cycles of {shape}, {method}, random weights", card.reading())
    with written(out, about, UNITS | {_column(part): "MB" for part in PARTS}) as write:
        rate = read_rate()
        torch.cuda.empty_cache()
        print(f"{torch.cuda.get_device_name()} reads {rate / TERA:.2f} TB/s")
        selector = SelectorConfig(selector_rank, CANDIDATES) if selector_rank else None
        engine_config = EngineConfig(kv_cache_dtype=kv_cache_dtype)
        workload = SyntheticWorkload(
            shape, length, prompt_tokens, ROOM, engine_config, selector=selector
        )
        setup = Setup(method, most, "fixed" if drafts is None else "auto")
        engine = cast(LocalEngine, workload.open(setup, max(levels)).engine).core
        kv = kv_dtype(kv_cache_dtype, engine.target.embed.weight.dtype)
        if drafts is not None:
            always(engine, drafts)
        rows: list[Row] = []
        for level in levels:
            cycle = measure(engine, level, prompt_tokens, temperature, steps, rate, kv)
            told = "" if drafts is None else f", {drafts} drafts"
            print(f"\n{shape}, {method}, K = {most}{told}, {cycle.requests} in flight")
            print(breakdown(cycle, top), flush=True)
            rows += [{**asked, **row} for row in cycle.rows(rate)]
            write(rows)


def _column(part: str) -> str:
    """Where a row says how much of a part a cycle reads."""
    return f"{part.replace(' ', '_')}_MB"


def always(engine: Engine, drafts: int) -> None:
    """From now on every cycle of an engine makes so many drafts."""
    chooser = engine.scheduler.pace.draft_length
    assert chooser is not None, "K is fixed"
    chooser.choose = lambda requests, followed, branch=True: drafts  # type: ignore[method-assign]


def read_rate() -> float:
    """Bytes per second of a large copy, read and written, or of a sum, whichever is higher."""
    source = torch.empty(BUFFER // 4, dtype=torch.float32, device="cuda").normal_()
    copied = torch.empty_like(source)
    copies = 2 * BUFFER / _seconds(lambda: copied.copy_(source))
    sums = BUFFER / _seconds(source.sum)
    return max(copies, sums)


def _seconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """The fastest of several calls by the card's own clock."""
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def measure(
    engine: Engine,
    level: int,
    prompt_tokens: int,
    temperature: float,
    steps: int,
    rate: float,
    kv: torch.dtype,
) -> Cycle:
    """Bring requests to a steady state, time steps, then profile as many more.

    rate: bytes per second that the card reads; kv: the type of the caches.
    """
    requests = start(engine, level, prompt_tokens, temperature)
    _step(engine, WARM_UP_STEPS)
    before = sum(request.computed for request in requests)
    begun = time.perf_counter()
    _step(engine, steps)
    wall = (time.perf_counter() - begun) / steps
    positions = (before + sum(request.computed for request in requests)) // 2
    kernels = profiled(engine, steps)
    reading = card.at_work(engine.step, SECONDS)
    for request in requests:
        engine.abort(request.id)
    _step(engine, 1)
    model = None if engine.proposer is None else engine.proposer.needs.network
    needed = cycle_bytes(engine.target, model, engine.k, level, positions, kv)
    floor = sum(needed.values()) / rate
    return Cycle(level, positions, wall * MICRO, needed, floor * MICRO, kernels, reading)


def start(engine: Engine, level: int, prompt_tokens: int, temperature: float = 0.0) -> list[Any]:
    """Requests that outlast the measurement, all past their prompts."""
    how = SamplingParams(
        max_tokens=engine.facts.max_length - prompt_tokens, ignore_eos=True, temperature=temperature
    )
    prompts = random_prompts(level, prompt_tokens, engine.facts.vocab_size)
    requests = [
        engine.add(str(i), prompt, how.model_copy(update={"seed": i}))
        for i, prompt in enumerate(prompts)
    ]
    while not all(request.output for request in requests):
        engine.step()
    return requests


def _step(engine: Engine, steps: int) -> None:
    torch.cuda.synchronize()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()


def profiled(engine: Engine, steps: int) -> list[Kernel]:
    """Every kernel of a cycle, longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _step(engine, steps)
    averages = (event for event in profile.key_averages() if event.self_device_time_total > 0)
    found = (Kernel(e.key, e.self_device_time_total / steps, e.count / steps) for e in averages)
    return sorted(found, key=lambda kernel: -kernel.microseconds)


def breakdown(cycle: Cycle, top: int) -> str:
    """Groups of kernels, the longest kernels, the bytes, and the share of the floor."""
    total, groups = cycle.kernels_us, grouped(cycle.kernels)
    lines = [
        f"{'':28}{'us a cycle':>12}{'share':>8}{'launches':>10}",
        *(_line(group.name, group, total) for group in groups),
        *(_line(f"  {kernel.name}", kernel, total) for kernel in cycle.kernels[:top]),
        *(f"{name:28}{count / 1e6:12.1f} MB" for name, count in cycle.bytes.items()),
        f"{cycle.floor_us:.0f} us to read them, of {cycle.wall_us:.0f} us a step: "
        f"{cycle.of_floor:.1%} ({total:.0f} us of kernels, {cycle.positions} cached tokens)",
        f"{cycle.card.get('power.draw')} W at {cycle.card.get('clocks.sm')} MHz",
    ]
    return "\n".join(lines)


def _line(name: str, kernel: Kernel, total: float) -> str:
    share = kernel.microseconds / total
    return f"{name[:27]:28}{kernel.microseconds:12.1f}{share:8.1%}{kernel.launches:10.1f}"


if __name__ == "__main__":
    run(main)
