"""Many streaming clients, some of which hang up: is every answer complete, and does nothing leak?

    python benchmarks/load.py --prompts ../shared/data/HumanEval.jsonl.gz --minutes 5

Each complete answer is compared with what the engine gives offline for the same request; greedy
and seeded sampling are mixed, and so is K. The exit code is 1 when anything is wrong.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from httpx2 import URL

from peagle import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.bench.http import HttpSession
from peagle.bench.prompts import load_prompts
from peagle.cli.script import run
from peagle.pair import bundled
from records.measuring import begun, written
from records.result import Row
from server_process import ServerProcess, page, scraped, started

K, JOBS = 7, 200
SETTLE_SECONDS = 150
"""Seconds after which memory is compared: by then every buffer has reached its largest size, and
every block of the cache was written."""
COUNTED = {
    "prompt_tokens_total": ("prompt_tokens",),
    "spec_decode_num_drafts_total": ("speculation", "cycles"),
    "spec_decode_num_draft_tokens_total": ("speculation", "drafted"),
    "spec_decode_num_accepted_tokens_total": ("speculation", "accepted"),
}
UNITS = {"answers": "answers", "wrong": "answers", "memory_growth": "share", "memory_MiB": "MiB"}
Job = dict[str, Any]


@dataclass
class Found:
    """What the clients saw."""

    answers: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    wrong: list[Job] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


def main(
    prompts: Annotated[str, typer.Option(help="HumanEval's file, or other prompts.")],
    minutes: Annotated[float, typer.Option(help="Duration.")] = 5.0,
    clients: Annotated[int, typer.Option(help="Streams in flight.")] = 64,
    leave: Annotated[float, typer.Option(help="Share of streams that hang up.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Run the load and print what it found."""
    draw = random.Random(seed)
    texts = [prompt.text for prompt in load_prompts(prompts, JOBS)]
    jobs = [_job(draw, texts) for _ in range(JOBS)]
    about = begun(f"{clients} streaming clients for {minutes:g} minutes, some of which hang up")
    asked = {"minutes": minutes, "clients": clients, "leave": leave, "seed": seed}
    with written(out, about, UNITS, **asked) as write:
        print("offline answers", file=sys.stderr)
        wanted = _offline(jobs)
        speculation = {"model": str(bundled("peagle")), "num_speculative_tokens": K}
        flags = [str(bundled("target")), "--speculative-config", json.dumps(speculation)]
        command = [sys.executable, "-m", "peagle", "serve", *flags, "--dtype", "float32", "--port"]
        with started(command) as server:
            print(f"{clients} clients for {minutes} minutes", file=sys.stderr)
            found, problems = asyncio.run(_run(server, jobs, wanted, minutes, clients, leave, draw))
        rows = [*_rows(found), *(Row(kind="problem", told=one) for one in problems)]
        print(json.dumps(rows, indent=2))
        write(rows)
    raise typer.Exit(1 if problems else 0)


def _job(draw: random.Random, texts: list[str]) -> Job:
    """A random request."""
    job: Job = {"prompt": draw.choice(texts), "max_tokens": draw.randint(16, 128), "seed": 1}
    job["temperature"] = draw.choice((0.0, 0.8))
    job["speculation"] = {"num_speculative_tokens": draw.choice((0, 3, K, K, K))}
    return job


def _offline(jobs: list[Job]) -> list[str]:
    speculation = SpeculativeConfig(model=str(bundled("peagle")), num_speculative_tokens=K)
    llm = LLM(bundled("target"), speculation, EngineConfig(dtype="float32"))
    params = [
        SamplingParams(
            max_tokens=job["max_tokens"],
            temperature=job["temperature"],
            seed=job["seed"],
            num_speculative_tokens=job["speculation"]["num_speculative_tokens"],
        )
        for job in jobs
    ]
    return [done.text for done in llm.generate([job["prompt"] for job in jobs], params)]


async def _run(
    server: ServerProcess,
    jobs: list[Job],
    wanted: list[str],
    minutes: float,
    clients: int,
    leave: float,
    draw: random.Random,
) -> tuple[Found, list[str]]:
    found, before = Found(), await scrape(server)
    end = time.monotonic() + 60 * minutes
    watching = asyncio.create_task(_watch(server, found))

    async def client() -> None:
        while time.monotonic() < end:
            index = draw.randrange(len(jobs))
            events = draw.randint(1, 12) if draw.random() < leave else None
            await _stream(server.root, jobs[index], wanted[index], events, found)

    await asyncio.gather(*(client() for _ in range(clients)))
    watching.cancel()
    await asyncio.sleep(2)
    return found, await _problems(server, found, before)


async def _stream(root: URL, job: Job, wanted: str, events: int | None, found: Found) -> None:
    """One streamed request; hangs up after `events` events if that is not None."""
    body = {**job, "stream": True, "stream_options": {"include_usage": True}}
    text, usage, left = "", None, False
    try:
        async with HttpSession(root) as connection:
            answer = await connection.ask("POST", "/v1/completions", json.dumps(body).encode())
            async for event in answer.events():
                usage = event.get("usage")
                text += "".join(choice["text"] for choice in event["choices"])
                if events is not None and (events := events - 1) == 0:
                    left = True
                    break
    except (OSError, EOFError, ValueError, KeyError) as error:
        found.wrong.append({**job, "error": repr(error)})
        return
    if left:
        found.answers["left"] += 1
        if not wanted.startswith(text):
            found.wrong.append({**job, "found": text, "wanted": wanted})
        return
    found.answers["complete"] += 1
    if text != wanted:
        found.wrong.append({**job, "found": text, "wanted": wanted})
    for name, path in COUNTED.items():
        value: Any = usage
        for key in path:
            value = value[key]
        found.sums[name] += value


async def scrape(server: ServerProcess) -> dict[str, float]:
    """Every sample of /metrics without histogram buckets, summed over the labels."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, _, value in await scraped(server.root):
        if "_bucket" not in name:
            found[name.removeprefix("vllm:")] += value
    return dict(found)


async def _watch(server: ServerProcess, found: Found) -> None:
    start = time.monotonic()
    while True:
        found.memory.append((time.monotonic() - start, memory(server.pid)))
        await asyncio.sleep(1)


async def _problems(server: ServerProcess, found: Found, before: dict[str, float]) -> list[str]:
    after = await scrape(server)
    problems = [f"{len(found.wrong)} wrong answers: {found.wrong[:2]}"] if found.wrong else []
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        if after[name]:
            problems.append(f"{name} is {after[name]} when idle")
    for name, wanted in found.sums.items():
        counted = after[name] - before.get(name, 0.0)
        if counted < wanted or (counted > wanted and not found.answers["left"]):
            problems.append(f"{name} counted {counted}, but the answers sum to {wanted}")
    if abs(_growth(found)) > 0.02:
        problems.append(f"memory changed by {_growth(found):.1%}")
    if await page(server.root, "/health") is None:
        problems.append("the server is not healthy")
    return problems


def _growth(found: Found) -> float:
    """Relative change of memory after it settled, both ends averaged over ten samples."""
    settled = [size for at, size in found.memory if at >= SETTLE_SECONDS]
    if len(settled) < 20:
        return 0.0
    return sum(settled[-10:]) / sum(settled[:10]) - 1


def _rows(found: Found) -> list[Row]:
    """Answers that came whole and that were left, then what was wrong and what memory did."""
    kinds: list[Row] = [{"kind": name, "answers": count} for name, count in found.answers.items()]
    whole = {"wrong": len(found.wrong), "memory_growth": round(_growth(found), 5)}
    return [*kinds, {"kind": "all", **whole, "memory_MiB": found.memory[-1][1] >> 20}]


def memory(pid: int) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    run(main)
