"""What HTTP costs: time to first token and tokens per second through the server and without it.

    python benchmarks/server/overhead.py --prompts ../shared/data/HumanEval.jsonl.gz

The engine runs in this process, asked through `AsyncLLM`, and the server in its own. They take
turns, and while one works the other waits. Greedy, end of text ignored, no prefix caching: both
write the same tokens. Clients share the cores with the server, so they only read the bytes of an
answer.

Tokens per second are taken with clients that ask for their next text as soon as they have the last.
The first token is timed twice: so, and with a pause before each question, the same on both sides.
An engine answers later the longer it was idle (its threads sleep and its caches cool), whoever
asks: back to back, the milliseconds that the bytes of an answer and of the next question travel
count as the server's a second time, in a prefill that starts colder.
"""

import asyncio
import json
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from process import serve

from peagle import LLM, AsyncLLM, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.bench.pair import bundled
from peagle.bench.prompts import load_prompts
from peagle.bench.report import machine

K, SLOWER = 7, 1.05
CONCURRENCIES = (1, 16)
PAUSE = 0.02
"""Seconds before a question, where clients pause."""
END = b"0\r\n\r\n"
"""The last, empty chunk."""
Ask = Callable[[str, int], AsyncIterator[Any]]
"""A prompt and a number of tokens -> the answer, piece by piece."""


@dataclass(frozen=True)
class Load:
    """What is asked in one pass."""

    prompts: Sequence[str]
    tokens: int
    concurrency: int
    pause: float


@dataclass(frozen=True)
class Pass:
    """All prompts once."""

    otps: float
    ttft: float
    """Median, in seconds."""


def main(
    prompts: Annotated[str, typer.Option(help="HumanEval's file, or other prompts.")],
    limit: Annotated[int, typer.Option(help="How many prompts.")] = 32,
    joined: Annotated[int, typer.Option(help="How many texts make one prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 128,
    rounds: Annotated[int, typer.Option(help="Passes of each side.")] = 5,
    out: Annotated[Path | None, typer.Option(help="File of the result.")] = None,
) -> None:
    """Measure both sides and print their ratios."""
    pair = {"model": str(bundled("peagle")), "num_speculative_tokens": K}
    config = EngineConfig(dtype="float32", enable_prefix_caching=False, max_num_seqs=64)
    llm = AsyncLLM(lambda: LLM(bundled("target"), SpeculativeConfig(**pair), config))
    parts = [prompt.text for prompt in load_prompts(prompts, limit * joined)]
    texts = ["".join(parts[index::limit]) for index in range(limit)]
    flags = [str(bundled("target")), "--speculative-config", json.dumps(pair)]
    flags += ["--dtype", "float32", "--no-enable-prefix-caching"]
    rows = []
    with serve(flags, Path(tempfile.mkstemp()[1])) as server:
        for concurrency in CONCURRENCIES:
            busy, calm = (
                list(_passes(llm, server.port, Load(texts, max_tokens, concurrency, pause), rounds))
                for pause in (0.0, PAUSE)
            )
            rows.append(_row(concurrency, busy, calm))
            print(json.dumps(rows[-1]))
    if out is not None:
        facts = {"prompts": limit, "joined": joined, "max_tokens": max_tokens, "rounds": rounds}
        out.write_text(json.dumps(machine() | facts | {"rows": rows}, indent=2) + "\n")
    slow = any(row[name] > SLOWER for row in rows for name in ("ttft_ratio", "time_ratio"))
    raise typer.Exit(1 if slow else 0)


def _passes(llm: AsyncLLM, port: int, load: Load, rounds: int) -> Iterator[tuple[Pass, Pass]]:
    """The engine's pass and the server's, in turns; the first of each only warms up."""
    for index in range(rounds + 1):
        pair = asyncio.run(_engine(llm, load)), asyncio.run(_server(port, load))
        if index:
            yield pair


async def _run(clients: Sequence[Ask], load: Load) -> Pass:
    """Every prompt once, whichever client is free."""
    waiting, firsts = iter(load.prompts), []

    async def work(ask: Ask) -> None:
        for prompt in waiting:
            if load.pause:
                await asyncio.sleep(load.pause)
            start, first = time.perf_counter(), 0.0
            async for _ in ask(prompt, load.tokens):
                first = first or time.perf_counter() - start
            firsts.append(first)

    start = time.perf_counter()
    await asyncio.gather(*map(work, clients))
    seconds = time.perf_counter() - start
    return Pass(len(load.prompts) * load.tokens / seconds, statistics.median(firsts))


async def _engine(llm: AsyncLLM, load: Load) -> Pass:
    async def ask(prompt: str, tokens: int) -> AsyncIterator[Any]:
        async for chunk in llm.stream(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)):
            yield chunk

    return await _run([ask] * load.concurrency, load)


async def _server(port: int, load: Load) -> Pass:
    def asker(line: socket.socket) -> Ask:
        loop = asyncio.get_running_loop()

        async def ask(prompt: str, tokens: int) -> AsyncIterator[Any]:
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
            await loop.sock_sendall(line, _request({**body, "stream": True}))
            data = await loop.sock_recv(line, 1 << 16)
            if b"data: " not in data:
                data = await loop.sock_recv(line, 1 << 16)
            while not data.endswith(END):
                yield data
                data = await loop.sock_recv(line, 1 << 16)
            yield data

        return ask

    with ExitStack() as lines:
        address = ("127.0.0.1", port)
        connected = [
            lines.enter_context(socket.create_connection(address)) for _ in range(load.concurrency)
        ]
        for line in connected:
            line.setblocking(False)
        return await _run([asker(line) for line in connected], load)


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _row(
    concurrency: int, busy: Sequence[tuple[Pass, Pass]], calm: Sequence[tuple[Pass, Pass]]
) -> dict[str, Any]:
    """Best of the rounds on each side, and how much longer the server took."""
    otps = [max(one.otps for one in side) for side in zip(*busy, strict=True)]
    row = {
        "concurrency": concurrency,
        "engine_otps": round(otps[0], 1),
        "server_otps": round(otps[1], 1),
        "time_ratio": round(otps[0] / otps[1], 4),
    }
    for name, passes in (("ttft", calm), ("back_to_back_ttft", busy)):
        ttft = [min(one.ttft for one in side) for side in zip(*passes, strict=True)]
        row[f"engine_{name}_ms"] = round(1e3 * ttft[0], 2)
        row[f"server_{name}_ms"] = round(1e3 * ttft[1], 2)
        row[f"{name}_ratio"] = round(ttft[1] / ttft[0], 4)
    return row


if __name__ == "__main__":
    typer.run(main)
