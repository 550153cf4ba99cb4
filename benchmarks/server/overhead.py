"""What HTTP costs: time to first token and tokens per second through the server and without it.

    python benchmarks/server/overhead.py --prompts ../shared/data/HumanEval.jsonl.gz

The engine runs in this process, called through `AsyncLLM`, the server in its own, and in a third
the same engine behind a protocol of a few lines (`bare.py`), which is what HTTP costs any server in
Python. They take turns, and while one works the others wait. Greedy, end of text ignored, no prefix
caching: all write the same tokens. Clients share the cores with the servers, and their time would
count as HTTP's: so they are plain sockets, one loop reads whichever has data, and it only looks for
the first token and the end.

The sides take turns with every question (with C in flight, every C questions), in random order,
each after a pause, so that other work on the machine and cold caches affect all alike. With C in
flight only the first token is timed this way, from the first question on, as the mean over C
questions, since the first to arrive is answered alone; tokens per second then come from whole
passes, with clients that ask for their next text as soon as they have the last.

Starts of one side differ by 3 to 7 % on two cores, so each is started several times.
"""

import asyncio
import itertools
import json
import multiprocessing
import random
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import typer
from process import bare, serve

from peagle import LLM, AsyncLLM, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.bench.environment import machine
from peagle.bench.prompts import load_prompts
from peagle.bench.result_file import result_file
from peagle.cli.script import run
from peagle.pair import bundled

K, SLOWER = 7, 1.05
GPU_SHARES = (0.28, 0.56, 0.84)
"""Share of a GPU that may be in use once each of the three engines, in order, has started."""
CONCURRENCIES = (1, 16)
TURNS = {1: 2, 16: 16}
"""Concurrency -> how often every prompt is asked in turn, for each pass."""
PAUSE = 0.02
"""Seconds before each question that is asked in turn."""
SHORT = 8
"""Tokens of its answer, if several are in flight."""
END = b"0\r\n\r\n"
"""The last, empty chunk of an answer."""


def main(
    prompts: Annotated[str, typer.Option(help="HumanEval's file, or other prompts.")],
    limit: Annotated[int, typer.Option(help="Number of prompts.")] = 32,
    joined: Annotated[str, typer.Option(help="Texts joined into each prompt; several: 1,8.")] = "1",
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each.")] = 128,
    rounds: Annotated[int, typer.Option(help="Passes per start; more for TTFT.")] = 2,
    starts: Annotated[int, typer.Option(help="Starts of each side.")] = 3,
    target: Annotated[
        str, typer.Option(help="Target, with --drafter; by default the bundled.")
    ] = "",
    drafter: Annotated[str, typer.Option(help="Its P-EAGLE drafter.")] = "",
    dtype: Annotated[str, typer.Option(help="Dtype of weights and activations.")] = "float32",
    out: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Measure all sides and print their ratios."""
    asked = Asked(target or str(bundled("target")), drafter or str(bundled("peagle")), dtype)
    counts = [int(count) for count in joined.split(",")]
    parts = [prompt.text for prompt in load_prompts(prompts, limit * max(counts))]
    cases = [
        Case(count, concurrency, ["".join(parts[i : limit * count : limit]) for i in range(limit)])
        for count, concurrency in itertools.product(counts, CONCURRENCIES)
    ]
    with result_file(out) as write:
        found = [_started(asked, cases, max_tokens, rounds) for _ in range(starts)]
        rows, each = _rows(cases, found), [_rows(cases, [one]) for one in found]
        facts = {"prompts": limit, "max_tokens": max_tokens, "rounds": rounds, "starts": starts}
        for row in rows:
            print(json.dumps(row))
        write(machine() | facts | {"rows": rows, "each_start": each})
    slow = any(row[name] > SLOWER for row in rows for name in ("ttft_ratio", "time_ratio"))
    raise typer.Exit(1 if slow else 0)


@dataclass(frozen=True)
class Case:
    """The prompts, and how many of them are in flight."""

    joined: int
    """Texts joined into each prompt."""
    concurrency: int
    prompts: Sequence[str]


@dataclass(frozen=True)
class Asked:
    """An engine's settings, in the form that each side takes."""

    target: str
    drafter: str
    dtype: str

    @property
    def _speculation(self) -> dict[str, Any]:
        return {"model": self.drafter, "num_speculative_tokens": K, "parallel_drafting": True}

    def _config(self, share: float) -> dict[str, Any]:
        shared = {"max_num_seqs": max(CONCURRENCIES), "gpu_memory_utilization": share}
        return {"dtype": self.dtype, "enable_prefix_caching": False, **shared}

    def engine(self) -> AsyncLLM:
        """The engine in this process."""
        speculation = SpeculativeConfig(**self._speculation)
        config = EngineConfig(**self._config(GPU_SHARES[0]))
        return AsyncLLM(lambda: LLM(self.target, speculation, config))

    @property
    def flags(self) -> list[str]:
        """Arguments of `peagle serve`."""
        flags = [self.target, "--speculative-config", json.dumps(self._speculation)]
        flags += ["--dtype", self.dtype, "--no-enable-prefix-caching"]
        shared = ["--max-num-seqs", str(max(CONCURRENCIES)), "--gpu-memory-utilization"]
        return [*flags, *shared, str(GPU_SHARES[1])]

    @property
    def arguments(self) -> list[str]:
        """Arguments of `bare.py`."""
        return [self.target, json.dumps(self._speculation), json.dumps(self._config(GPU_SHARES[2]))]


@dataclass(frozen=True)
class Timed:
    """Seconds of a question, or the mean of several in flight."""

    first: float
    """Seconds to the first token."""
    each: float
    """Seconds per token of the whole answer, if nothing else was in flight."""


@dataclass(frozen=True)
class Found:
    """A case's times in one start of every side."""

    turns: list[tuple[Timed, ...]]
    """For every turn each side's times, over the questions in flight."""
    rates: list[tuple[float, ...]]
    """For every pass each side's tokens per second; empty at one request in flight."""


def _started(asked: Asked, cases: Sequence[Case], tokens: int, rounds: int) -> list[Found]:
    """Measure every case with an engine and servers that are started for it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        found = process.submit(measured, asked, cases, tokens, rounds).result()
    for row in _rows(cases, [found]):
        print(json.dumps({"start": row}), flush=True)
    return found


def measured(asked: Asked, cases: Sequence[Case], tokens: int, rounds: int) -> list[Found]:
    """Measure every case in this process."""
    llm, log = asked.engine(), Path(tempfile.mkdtemp())
    with (
        asyncio.Runner() as loop,
        serve(asked.flags, log / "server") as server,
        bare(asked.arguments, log / "bare") as least,
    ):
        sides = Engine(llm, loop), Server(server.port), Server(least.port)
        return [Sides(sides, case, tokens).measure(rounds) for case in cases]


@dataclass(frozen=True)
class Answer:
    """When a question was asked, its first token came, and its last; seconds of one clock."""

    start: float
    first: float
    end: float


class Side(Protocol):
    """What answers questions."""

    def ask(self, prompts: Iterable[str], tokens: int, at_once: int) -> list[Answer]:
        """Pause, then keep `at_once` prompts in flight; answers in the order of their ends."""
        ...


@dataclass(frozen=True)
class Sides:
    """The engine, the server and the bare protocol, with the same questions."""

    sides: tuple[Side, ...]
    case: Case
    tokens: int
    """Tokens of each answer that is timed to its end."""

    def measure(self, rounds: int) -> Found:
        """Times of every side; the first pass only warms up and is not counted."""
        turns = self._turns(TURNS[self.case.concurrency] * rounds + 1)
        if self.case.concurrency == 1:
            return Found(turns, [])
        passes = [tuple(map(self._rate, self.sides)) for _ in range(rounds + 1)]
        return Found(turns, passes[1:])

    def _rate(self, side: Side) -> float:
        """Tokens per second over every prompt once, each by whichever client is free."""
        found = side.ask(self.case.prompts, self.tokens, self.case.concurrency)
        begun = min(answer.start for answer in found)
        return len(found) * self.tokens / (found[-1].end - begun)

    def _turns(self, rounds: int) -> list[tuple[Timed, ...]]:
        draw, found = random.Random(0), []
        begins = range(0, len(self.case.prompts), self.case.concurrency)
        for begin in [*begins] * rounds:
            turn = {
                side: self._turn(self.sides[side], begin)
                for side in draw.sample(range(len(self.sides)), len(self.sides))
            }
            found.append(tuple(turn[side] for side in sorted(turn)))
        return found[len(begins) :]

    def _turn(self, side: Side, begin: int) -> Timed:
        """Times of one question per client, all in flight together."""
        asked = self.case.prompts[begin : begin + self.case.concurrency]
        tokens = self.tokens if self.case.concurrency == 1 else SHORT
        found = side.ask(asked, tokens, self.case.concurrency)
        start = min(answer.start for answer in found)
        return Timed(
            statistics.mean(answer.first for answer in found) - start,
            statistics.mean(answer.end - answer.start for answer in found) / tokens,
        )


@dataclass(frozen=True)
class Engine:
    """The engine, called from Python."""

    llm: AsyncLLM
    loop: asyncio.Runner

    def ask(self, prompts: Iterable[str], tokens: int, at_once: int) -> list[Answer]:
        """Ask with `at_once` tasks."""
        waiting = iter(prompts)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        found = []

        async def work() -> None:
            for prompt in waiting:
                start, first = time.perf_counter(), 0.0
                async for _ in self.llm.stream(prompt, params):
                    first = first or time.perf_counter()
                found.append(Answer(start, first, time.perf_counter()))

        async def all_work() -> None:
            await asyncio.gather(*(work() for _ in range(at_once)))

        time.sleep(PAUSE)
        self.loop.run(all_work())
        return found


@dataclass(frozen=True)
class Server:
    """A server, asked over HTTP."""

    port: int

    def ask(self, prompts: Iterable[str], tokens: int, at_once: int) -> list[Answer]:
        """Ask over new connections: a server closes those that idle for long."""
        requests = iter([_request(prompt, tokens) for prompt in prompts])
        with ExitStack() as lines, selectors.DefaultSelector() as selector:
            for _ in range(at_once):
                line = lines.enter_context(socket.create_connection(("127.0.0.1", self.port)))
                selector.register(line, selectors.EVENT_READ)
            time.sleep(PAUSE)
            return _answered(selector, requests)


def _answered(selector: selectors.BaseSelector, requests: Iterator[bytes]) -> list[Answer]:
    """Ask on every connection, and again after each answer, while there are questions."""
    start: dict[socket.socket, float] = {}
    first: dict[socket.socket, float] = {}
    found: list[Answer] = []

    def ask(line: socket.socket) -> None:
        request = next(requests, None)
        if request is not None:
            start[line] = time.perf_counter()
            line.sendall(request)

    lines = [cast(socket.socket, key.fileobj) for key in selector.get_map().values()]
    for line in lines:
        ask(line)
    while start:
        for key, _ in selector.select():
            line = cast(socket.socket, key.fileobj)
            data = line.recv(1 << 16)
            if not data:
                raise ConnectionError("the server closed a connection before its answer ended")
            now = time.perf_counter()
            if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"the server refused: {data.decode(errors='replace')}")
            if b"data: " in data:
                first.setdefault(line, now)
            if data.endswith(END):
                found.append(Answer(start.pop(line), first.pop(line), now))
                ask(line)
    return found


def _request(prompt: str, tokens: int) -> bytes:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    data = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _rows(cases: Sequence[Case], starts: Sequence[Sequence[Found]]) -> list[dict[str, Any]]:
    """A row for each case, over all starts."""
    return [_row(*one) for one in zip(cases, zip(*starts, strict=True), strict=True)]


def _row(case: Case, starts: Sequence[Found]) -> dict[str, Any]:
    """Each side's times, and how much longer HTTP took.

    For questions asked in turn these are medians, the ratios' too over questions; for passes the
    best of each start.
    """
    turns = [turn for found in starts for turn in found.turns]
    firsts = [tuple(side.first for side in turn) for turn in turns]
    each = [tuple(side.each for side in turn) for turn in turns]
    if case.concurrency > 1:
        each = [tuple(1 / max(side) for side in zip(*found.rates, strict=True)) for found in starts]
    seconds, ttft = (
        [statistics.median(s) for s in zip(*found, strict=True)] for found in (each, firsts)
    )
    time_ratios, ttft_ratios = (
        [statistics.median(one[side] / one[0] for one in found) for side in (1, 2)]
        for found in (each, firsts)
    )
    return {
        "joined": case.joined,
        "concurrency": case.concurrency,
        "engine_otps": round(1 / seconds[0], 1),
        "server_otps": round(1 / seconds[1], 1),
        "time_ratio": round(time_ratios[0], 4),
        "bare_time_ratio": round(time_ratios[1], 4),
        "engine_ttft_ms": round(1e3 * ttft[0], 2),
        "server_ttft_ms": round(1e3 * ttft[1], 2),
        "ttft_ratio": round(ttft_ratios[0], 4),
        "bare_ttft_ratio": round(ttft_ratios[1], 4),
    }


if __name__ == "__main__":
    run(main)
