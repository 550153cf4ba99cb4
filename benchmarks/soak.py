"""Hours of mixed traffic: does a server's text stay right, its memory level, its drafter accepted?

    python benchmarks/soak.py --minutes 9
    python benchmarks/soak.py --hours 8 --url http://localhost:8000 --out soak.json

The same requests come window after window: greedy, sampled, streams that are cut, and calls that a
grammar forces. After each window the server has time for its audits. The server that this starts
has a small KV cache, so that requests are preempted, and audits every answer; one at a URL does
what it was told to. The exit code is 1 for an answer that an audit found different, memory that
grows by more than 1 MB a minute after a third of the time, an acceptance length of the last window
that is 5 % under that of the first, and a call that does not parse.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from httpx2 import URL

from peagle.bench.http import HttpSession, server_url
from peagle.cli.script import run
from peagle.pair import bundled
from records.measuring import begun, written
from records.result import Row
from server_process import scraped, started

JOBS, CLIENTS, K = 48, 8, 7
REST = 120.0
"""Most seconds that audits get after a window."""
GROWTH, FALL = 1.0, 0.05
"""MB a minute, and share of the acceptance length, beyond which something is wrong."""
SIZES = {"max-num-seqs": CLIENTS, "max-model-len": 384, "kv-cache-memory": 6 << 20}
UNITS = {
    "memory_MB": "MB",
    "growth": "MB/min",
    "acceptance_length": "tokens",
    "minute": "min",
    "preemptions": "requests",
    "different": "answers",
    "audited": "answers",
    "calls": "answers",
    "wrong_calls": "answers",
    "failed": "answers",
}
SEEDS = ("def area(self):\n", "import os\n", "class Stack:\n    def push(self, item):\n", "# ")
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
TRIP = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo", "Porto"]}, "days": DAYS},
    "required": ["city", "days"],
    "additionalProperties": False,
}
RESULT = re.compile('result="([a-z_]+)"')
"""What an audit found, among the labels of a sample."""
TOOL = {"type": "function", "function": {"name": "plan_trip", "parameters": TRIP}}
Job = dict[str, Any]
Window = dict[str, float]


@dataclass
class Seen:
    """What clients and scrapes saw."""

    calls: int = 0
    wrong_calls: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)


def main(
    minutes: Annotated[float, typer.Option(help="Duration.")] = 9.0,
    hours: Annotated[float, typer.Option(help="Duration besides the minutes.")] = 0.0,
    url: Annotated[str | None, typer.Option(help="A server that runs. Default: one's own")] = None,
    jobs: Annotated[int, typer.Option(help="Requests of a window.")] = JOBS,
    out: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Run the traffic and print what was found, window by window."""
    seconds = 60 * minutes + 3600 * hours
    about = begun("A server under the same mixed requests again and again")
    with written(out, about, UNITS, seconds=seconds, jobs=jobs, clients=CLIENTS) as write:
        with _server(url) as root:
            seen = asyncio.run(_soak(root, _jobs(jobs), seconds))
        total, problems = judged(seen)
        each = [Row(kind="window", **window) for window in seen.windows]
        rows = [*each, total, *(Row(kind="problem", told=one) for one in problems)]
        print(json.dumps(rows, indent=2))
        write(rows)
    raise typer.Exit(1 if problems else 0)


@contextmanager
def _server(url: str | None) -> Iterator[URL]:
    if url is not None:
        yield server_url(url)
        return
    speculation = {"model": str(bundled("peagle")), "num_speculative_tokens": K}
    flags = [str(bundled("target")), "--speculative-config", json.dumps(speculation)]
    flags += ["--dtype", "float32", "--draft-length", "fixed", "--audit", "1"]
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    with started([sys.executable, "-m", "peagle", "serve", *flags, *sizes, "--port"]) as server:
        yield server.root


def _jobs(count: int) -> list[Job]:
    """The requests of every window."""
    draw = random.Random(0)
    kinds = [draw.choice(("greedy", "sampled", "sampled", "cut", "call")) for _ in range(count)]
    return [_job(kind, index, draw) for index, kind in enumerate(kinds)]


def _job(kind: str, index: int, draw: random.Random) -> Job:
    temperature = 0.0 if kind == "greedy" else 0.8
    job: Job = {"seed": index, "temperature": temperature, "max_tokens": draw.randint(40, 200)}
    if kind == "call":
        messages = [{"role": "user", "content": f"Plan trip {index}."}]
        forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        return {**job, **forced, "messages": messages, "max_tokens": 120}
    cut = draw.randint(1, 8) if kind == "cut" else None
    return {**job, "prompt": draw.choice(SEEDS) * draw.randint(1, 6), "cut": cut}


async def _soak(root: URL, jobs: list[Job], seconds: float) -> Seen:
    seen, start = Seen(), time.monotonic()
    while not seen.windows or time.monotonic() - start < seconds:
        before = await _scrape(root)
        left = iter(jobs)
        await asyncio.gather(*(_client(root, left, seen) for _ in range(CLIENTS)))
        await _rest(root)
        after = await _scrape(root)
        minute = (time.monotonic() - start) / 60
        seen.windows.append(_window(before, after, minute))
        print(json.dumps(seen.windows[-1]), file=sys.stderr)
    return seen


async def _client(root: URL, left: Iterator[Job], seen: Seen) -> None:
    for job in left:
        try:
            await (_call if "tools" in job else _stream)(root, job, seen)
        except (OSError, EOFError, ValueError, KeyError, IndexError) as error:
            seen.failed.append(repr(error))


async def _call(root: URL, job: Job, seen: Seen) -> None:
    """A call that a grammar forces, whose arguments have to be what it says."""
    seen.calls += 1
    async with HttpSession(root) as connection:
        answer = await connection.ask("POST", "/v1/chat/completions", json.dumps(job).encode())
        text = (await answer.body()).decode()
    try:
        [call] = json.loads(text)["choices"][0]["message"]["tool_calls"]
        trip = json.loads(call["function"]["arguments"])
        right = trip.keys() == {"city", "days"} and 1 <= trip["days"] <= 9
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        seen.wrong_calls.append(text[300:700])


async def _stream(root: URL, job: Job, seen: Seen) -> None:
    """A stream, perhaps one that its client leaves after some events."""
    body = {name: value for name, value in job.items() if name != "cut"} | {"stream": True}
    events = 0
    async with HttpSession(root) as connection:
        answer = await connection.ask("POST", "/v1/completions", json.dumps(body).encode())
        async for event in answer.events():
            if "error" in event:
                seen.failed.append(str(event["error"]))
            events += 1
            if events == job["cut"]:
                return


async def _rest(root: URL) -> None:
    """Wait until audits have nothing left to do, which their counter tells."""
    end, known = time.monotonic() + REST, -1.0
    while time.monotonic() < end:
        now = (await _scrape(root)).get("peagle:audited_tokens_total", 0.0)
        if now == known:
            return
        known = now
        await asyncio.sleep(4.0)


async def _scrape(root: URL) -> dict[str, float]:
    """Every sample, summed over labels; of audits and ends by what they found too."""
    found: dict[str, float] = {}
    for name, labels, value in await scraped(root):
        result = RESULT.search(labels)
        for key in (name, f"{name}/{result[1]}") if result else (name,):
            found[key] = found.get(key, 0.0) + value
    return found


def _window(before: dict[str, float], after: dict[str, float], minute: float) -> Window:
    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    cycles = grown("vllm:spec_decode_num_drafts_total")
    accepted = grown("vllm:spec_decode_num_accepted_tokens_total")
    resident = "process_resident_memory_bytes"
    same = after[resident] == after.get(f"peagle_engine_{resident}")
    memory = after[resident] + (0 if same else after.get(f"peagle_engine_{resident}", 0.0))
    return {
        "minute": round(minute, 2),
        "memory_MB": round(memory / 1e6, 1),
        "acceptance_length": round(1 + accepted / max(cycles, 1), 3),
        "preemptions": int(grown("vllm:num_preemptions_total")),
        "audited": int(grown("peagle:audited_requests_total")),
        "different": int(grown("peagle:audited_requests_total/different")),
    }


def judged(seen: Seen) -> tuple[Row, list[str]]:
    """The result of all windows, and what is wrong."""
    windows = seen.windows
    late = [one for one in windows if one["minute"] >= windows[-1]["minute"] / 3]
    growth = 0.0
    if len(late) > 2:
        line = np.polyfit([one["minute"] for one in late], [one["memory_MB"] for one in late], 1)
        growth = float(line[0])
    sums = {name: sum(one[name] for one in windows) for name in ("audited", "different")}
    first, last = windows[0]["acceptance_length"], windows[-1]["acceptance_length"]
    wrong = {"wrong_calls": len(seen.wrong_calls), "failed": len(seen.failed)}
    total: Row = {"kind": "all", "growth": round(growth, 3), **sums, "calls": seen.calls, **wrong}
    found = {
        f"{sums['different']} audited answers differ": sums["different"] > 0,
        f"memory grows by {growth:.2f} MB a minute": growth > GROWTH,
        f"the acceptance length fell from {first} to {last}": last < (1 - FALL) * first,
        f"calls do not parse: {seen.wrong_calls[:2]}": bool(seen.wrong_calls),
        f"requests failed: {seen.failed[:2]}": bool(seen.failed),
    }
    return total, [told for told, is_so in found.items() if is_so]


if __name__ == "__main__":
    run(main)
