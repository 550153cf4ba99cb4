"""What HTTP costs: time to first token and tokens per second through the server and without it.

    python benchmarks/server/overhead.py --prompts ../shared/data/HumanEval.jsonl.gz

The engine runs in this process, asked through `AsyncLLM`, the server in its own, and in a third the
same engine behind a protocol of a few lines (`bare.py`), which is what HTTP costs any server in
Python. They take turns, and while one works the others wait. Greedy, end of text ignored, no prefix
caching: all write the same tokens. Clients share the cores with the servers, so they only read the
bytes of an answer.

The sides take turns with every question (with C at once, every C questions), in a drawn order, each
after a pause: what else the machine does, and how cold its caches are, then meets both alike. With
C at once only the first token is timed so, of C questions the mean, since the first to arrive is
answered alone; tokens per second are then those of whole passes, with clients that ask for their
next text as soon as they have the last.

Starts of one side differ by 3 to 7 % on two cores, so each is started several times.
"""

import asyncio
import itertools
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from process import bare, serve

from peagle import LLM, AsyncLLM, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.bench.pair import bundled
from peagle.bench.prompts import load_prompts
from peagle.bench.report import machine, result_file

K, SLOWER = 7, 1.05
GPU_SHARES = (0.28, 0.56, 0.84)
"""Of a GPU, what may be in use once each of the three engines has started, one after another."""
CONCURRENCIES = (1, 16)
TURNS = {1: 2, 16: 16}
"""By concurrency, how often every prompt is asked in turn, for each pass."""
PAUSE = 0.02
"""Seconds before a question that is asked in turn."""
SHORT = 8
"""Tokens of its answer, where others are asked at once."""
END = b"0\r\n\r\n"
"""The last, empty chunk."""
Ask = Callable[[str, int], AsyncIterator[Any]]
"""A prompt and a number of tokens -> the answer, piece by piece; asked for when its first piece is,
so that wording the question is not timed."""


def main(
    prompts: Annotated[str, typer.Option(help="HumanEval's file, or other prompts.")],
    limit: Annotated[int, typer.Option(help="How many prompts.")] = 32,
    joined: Annotated[str, typer.Option(help="Of how many texts one is made; several: 1,8.")] = "1",
    max_tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 128,
    rounds: Annotated[int, typer.Option(help="Passes of each a start; more for TTFT.")] = 2,
    starts: Annotated[int, typer.Option(help="How often each side is started.")] = 3,
    target: Annotated[str, typer.Option(help="A target, with --drafter; else the bundled.")] = "",
    drafter: Annotated[str, typer.Option(help="Its P-EAGLE drafter.")] = "",
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "float32",
    out: Annotated[Path | None, typer.Option(help="File of the result.")] = None,
) -> None:
    """Measure both sides and print their ratios."""
    asked = Asked(target or str(bundled("target")), drafter or str(bundled("peagle")), dtype)
    counts = [int(count) for count in joined.split(",")]
    parts = [prompt.text for prompt in load_prompts(prompts, limit * max(counts))]
    cases = [
        Case(count, concurrency, ["".join(parts[i : limit * count : limit]) for i in range(limit)])
        for count, concurrency in itertools.product(counts, CONCURRENCIES)
    ]
    with result_file(out) as write:
        found = [_started(asked, cases, max_tokens, rounds) for _ in range(starts)]
        rows = [_row(*one) for one in zip(cases, zip(*found, strict=True), strict=True)]
        facts = {"prompts": limit, "max_tokens": max_tokens, "rounds": rounds, "starts": starts}
        for row in rows:
            print(json.dumps(row))
        write(machine() | facts | {"rows": rows})
    slow = any(row[name] > SLOWER for row in rows for name in ("ttft_ratio", "time_ratio"))
    raise typer.Exit(1 if slow else 0)


@dataclass(frozen=True)
class Case:
    """What is asked, and how much of it at once."""

    joined: int
    """Texts that each prompt is made of."""
    concurrency: int
    prompts: Sequence[str]


@dataclass(frozen=True)
class Asked:
    """One engine's settings, as each side takes them."""

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
        """In this process."""
        speculation = SpeculativeConfig(**self._speculation)
        config = EngineConfig(**self._config(GPU_SHARES[0]))
        return AsyncLLM(lambda: LLM(self.target, speculation, config))

    @property
    def flags(self) -> list[str]:
        """Of `peagle serve`."""
        flags = [self.target, "--speculative-config", json.dumps(self._speculation)]
        flags += ["--dtype", self.dtype, "--no-enable-prefix-caching"]
        shared = ["--max-num-seqs", str(max(CONCURRENCIES)), "--gpu-memory-utilization"]
        return [*flags, *shared, str(GPU_SHARES[1])]

    @property
    def arguments(self) -> list[str]:
        """Of `bare.py`."""
        return [self.target, json.dumps(self._speculation), json.dumps(self._config(GPU_SHARES[2]))]


@dataclass(frozen=True)
class Timed:
    """Seconds that a question took, or several at once on average."""

    first: float
    """To its first token."""
    each: float
    """Of the whole answer, a token, where nothing else was asked."""


@dataclass(frozen=True)
class Found:
    """What one start of every side took for a case."""

    turns: list[tuple[Timed, ...]]
    """Each side's, of as many questions as are asked at once."""
    rates: list[tuple[float, ...]]
    """Each side's tokens per second of a pass; none at one request."""


def _started(asked: Asked, cases: Sequence[Case], tokens: int, rounds: int) -> list[Found]:
    """Every case, by an engine and servers that are started for it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        found = process.submit(measured, asked, cases, tokens, rounds).result()
    for case, one in zip(cases, found, strict=True):
        print(json.dumps({"start": _row(case, [one])}), flush=True)
    return found


def measured(asked: Asked, cases: Sequence[Case], tokens: int, rounds: int) -> list[Found]:
    """The same in this process."""
    llm, log = asked.engine(), Path(tempfile.mkdtemp())
    with (
        serve(asked.flags, log / "server") as server,
        bare(asked.arguments, log / "bare") as least,
    ):
        ports = server.port, least.port
        return [Sides(llm, ports, case, tokens).measure(rounds) for case in cases]


@dataclass(frozen=True)
class Sides:
    """The engine, the server and the bare protocol, asked the same."""

    llm: AsyncLLM
    ports: tuple[int, int]
    """The server's and the bare protocol's."""
    case: Case
    tokens: int
    """Of each answer that is timed to its end."""

    def measure(self, rounds: int) -> Found:
        """What each takes; the first pass, not counted, only warms up."""
        turns = asyncio.run(self._turns(TURNS[self.case.concurrency] * rounds + 1))
        if self.case.concurrency == 1:
            return Found(turns, [])
        return Found(turns, asyncio.run(self._rates(rounds + 1))[1:])

    async def _rates(self, rounds: int) -> list[tuple[float, ...]]:
        found = []
        for _ in range(rounds):
            with self._clients() as sides:
                found.append(tuple([await self._rate(clients) for clients in sides]))
        return found

    async def _rate(self, clients: Sequence[Ask]) -> float:
        """Every prompt once, whichever client is free."""
        waiting = iter(self.case.prompts)

        async def work(ask: Ask) -> None:
            for prompt in waiting:
                async for _ in ask(prompt, self.tokens):
                    pass

        start = time.perf_counter()
        await asyncio.gather(*map(work, clients))
        return len(self.case.prompts) * self.tokens / (time.perf_counter() - start)

    async def _turns(self, rounds: int) -> list[tuple[Timed, ...]]:
        draw, found = random.Random(0), []
        begins = range(0, len(self.case.prompts), self.case.concurrency)
        for begin in [*begins] * rounds:
            turn: dict[int, Timed] = {}
            with self._clients() as sides:
                for side in draw.sample(range(len(sides)), len(sides)):
                    turn[side] = await self._turn(sides[side], begin)
            found.append(tuple(turn[side] for side in sorted(turn)))
        return found[len(begins) :]

    async def _turn(self, clients: Sequence[Ask], begin: int) -> Timed:
        """As many questions as there are clients, at once."""
        await asyncio.sleep(PAUSE)
        asked = self.case.prompts[begin : begin + len(clients)]
        timed = await asyncio.gather(*map(self._timed, clients, asked))
        return Timed(*(statistics.mean(each) for each in zip(*map(astuple, timed), strict=True)))

    async def _timed(self, ask: Ask, prompt: str) -> Timed:
        answer = ask(prompt, self.tokens if self.case.concurrency == 1 else SHORT)
        start, first = time.perf_counter(), 0.0
        async for _ in answer:
            first = first or time.perf_counter() - start
        return Timed(first, (time.perf_counter() - start) / self.tokens)

    @contextmanager
    def _clients(self) -> Iterator[list[list[Ask]]]:
        """New connections: a server closes those that wait for long."""
        with ExitStack() as lines:
            sides = [[_engine(self.llm)] * self.case.concurrency]
            for port in self.ports:
                connected = [
                    lines.enter_context(socket.create_connection(("127.0.0.1", port)))
                    for _ in range(self.case.concurrency)
                ]
                for line in connected:
                    line.setblocking(False)
                sides.append([_server(line) for line in connected])
            yield sides


def _engine(llm: AsyncLLM) -> Ask:
    def ask(prompt: str, tokens: int) -> AsyncIterator[Any]:
        return llm.stream(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))

    return ask


def _server(line: socket.socket) -> Ask:
    def ask(prompt: str, tokens: int) -> AsyncIterator[Any]:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return _answer(line, _request({**body, "stream": True}))

    return ask


async def _answer(line: socket.socket, request: bytes) -> AsyncIterator[bytes]:
    await asyncio.get_running_loop().sock_sendall(line, request)
    data = await _received(line)
    if b"data: " not in data:
        data = await _received(line)
    while not data.endswith(END):
        yield data
        data = await _received(line)
    yield data


async def _received(line: socket.socket) -> bytes:
    data = await asyncio.get_running_loop().sock_recv(line, 1 << 16)
    if not data:
        raise ConnectionError("the server closed a connection before its answer ended")
    return data


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _row(case: Case, starts: Sequence[Found]) -> dict[str, Any]:
    """What each side took, and how much longer HTTP did.

    Of questions asked in turn medians, for the ratios those over the questions; of passes the best
    of each start.
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
    typer.run(main)
