"""How long the device waits between captured cycles while the host turns tokens into text.

    python benchmarks/gpu/idle.py --shape qwen3-8b --method peagle --concurrency 64 --out idle.json

Random weights, given acceptance, a word for each token, engine and text in one process. The
profiler tells when each kernel began and ended; the device is idle where none runs. Kernels of a
cycle follow one another within some microseconds, so a longer pause is one between cycles.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import card
import torch
import typer
from chats import MARKERS, words
from synthetic_engine import synthetic_engine

from peagle.bench.environment import hardware, machine
from peagle.bench.result_file import result_file
from peagle.bench.shapes import random_prompts
from peagle.cli.script import run
from peagle.config import SamplingParams
from peagle.errors import InputError
from peagle.llm import LLM

PROMPT_TOKENS, ROOM = 256, 2048
"""Of a request, and the tokens after them: more than the steps emit."""
WARM_UP_STEPS = 32
BETWEEN_US = 10.0
"""The shortest pause that is one between cycles."""
Kernel = tuple[float, float]
"""When a kernel began and ended, in microseconds."""


@dataclass(frozen=True)
class Idle:
    """A stretch of time, and how much of it the device did nothing."""

    microseconds: float
    kernels: int
    between_cycles: float
    """Share of the time in pauses of `BETWEEN_US` or more."""
    within_cycles: float
    """Share of the time in shorter ones."""
    longest_us: list[float]
    """The longest pauses."""


def main(
    shape: Annotated[str, typer.Option(help="A shape of peagle bench.")] = "qwen3-8b",
    method: Annotated[str, typer.Option(help="none, peagle or eagle3.")] = "peagle",
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps to look at.")] = 100,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Print what share of the time the device was idle."""
    if not torch.cuda.is_available():
        raise InputError("a GPU's pauses are measured, and there is none")
    with result_file(out) as write:
        engine = synthetic_engine(shape, method, concurrency, PROMPT_TOKENS + ROOM)
        found = idle(kernels_of(LLM.over(engine, words(engine.vocab_size)), concurrency, steps))
        print(
            f"{found.between_cycles:.2%} between cycles, {found.within_cycles:.2%} within them, of "
            f"{found.microseconds / 1e3:.0f} ms"
        )
        facts = machine() | hardware("auto", "auto") | {"card": card.reading()}
        facts |= {"shape": shape, "method": method, "concurrency": concurrency, "steps": steps}
        write(facts | asdict(found))


def kernels_of(llm: LLM, level: int, steps: int) -> list[Kernel]:
    """The kernels of so many steps, once all requests are writing."""
    params = SamplingParams(max_tokens=ROOM, ignore_eos=True)
    vocab = llm.engine.vocab_size - len(MARKERS)
    for prompt in random_prompts(level, PROMPT_TOKENS, vocab):
        llm.submit(llm.prepare(prompt, params))
    for _ in range(WARM_UP_STEPS):
        llm.step()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            llm.step()
    cuda = torch.autograd.DeviceType.CUDA
    ranges = (event.time_range for event in profile.events() if event.device_type == cuda)
    return [(each.start, each.end) for each in ranges]


def idle(kernels: Iterable[Kernel]) -> Idle:
    """How long none of some kernels ran between the first one's begin and the last one's end."""
    ordered = sorted(kernels)
    whole = max(end for _, end in ordered) - ordered[0][0]
    found = sorted(pauses(ordered), reverse=True)
    between = sum(pause for pause in found if pause >= BETWEEN_US)
    return Idle(whole, len(ordered), between / whole, (sum(found) - between) / whole, found[:10])


def pauses(ordered: Iterable[Kernel]) -> Iterator[float]:
    """The times in which no kernel ran. ordered: by their begin."""
    done: float | None = None
    for start, end in ordered:
        if done is not None and start > done:
            yield start - done
        done = end if done is None else max(done, end)


if __name__ == "__main__":
    run(main)
