"""Hours of mixed traffic: does a server's text stay right, its memory level, its drafter accepted?

    python benchmarks/soak.py --minutes 9
    python benchmarks/soak.py --hours 8 --url http://localhost:8000 --longest 40000 --out soak.json
    python benchmarks/soak.py --url http://localhost:8000 --longest 40000 --before soak.json

The same requests come window after window: greedy, sampled, streams that are cut, and calls that a
grammar forces. After each window the server has time for its audits. The server that this starts
has a small KV cache, so that requests are preempted, and audits every answer; one at a URL does
what it was told to. With --longest every fourth text is long, by token ids that no other window
finds in a prefix cache, and a prompt above the server's context has to be refused. With --before an
earlier run against the same server, which went on running, counts as the beginning.

The exit code is 1 for an answer that an audit found different, memory of the processes or of the
graphics card that grows by more than 1 MB a minute after a third of the time, an acceptance length
of the last tenth of the windows that is 5 % under that of the first (one text more that repeats
itself moves a window by as much), a call that does not parse, a request that
fails, and a prompt too long that does not. The processes tell their memory; the card is the first
that this machine shows. Set acceptance leaves nothing to audit, and breaks the grammar of calls:
--no-calls.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer
from httpx2 import URL

from peagle.bench.http import HttpSession, Reply
from peagle.cli.script import run
from peagle.errors import InputError
from peagle.pair import bundled
from peagle.server_url import server_url
from peers import card
from records.measuring import begun, written
from records.result import Result, Row
from records.store import read
from server_process import page, scraped, started

JOBS, CLIENTS, K = 48, 8, 7
REST = 120.0
"""Most seconds that audits get after a window."""
GROWTH, FALL = 1.0, 0.05
"""MB a minute, and share of the acceptance length, beyond which something is wrong."""
SIZES = {"max-num-seqs": CLIENTS, "max-model-len": 384, "kv-cache-memory": 6 << 20}
UNITS = {
    "memory_MB": "MB",
    "card_MB": "MB",
    "growth": "MB/min",
    "card_growth": "MB/min",
    "acceptance_length": "tokens",
    "minute": "min",
    "preemptions": "requests",
    "different": "answers",
    "audited": "answers",
    "calls": "answers",
    "refused": "requests",
    "wrong_calls": "answers",
    "failed": "answers",
}
SEEDS = ("def area(self):\n", "import os\n", "class Stack:\n    def push(self, item):\n", "# ")
LINES = (*SEEDS, "    return self.items\n", "for name in names:\n", "x = 1\n", "\n", "import sys\n")
"""What long prompts are made of."""
SHORT, EACH = 200, 4
"""Least tokens of a long prompt, and of how many texts one is long."""
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
TRIP = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo", "Porto"]}, "days": DAYS},
    "required": ["city", "days"],
    "additionalProperties": False,
    # or a model of random weights writes spaces for ever
    "x-guidance": {"whitespace_flexible": False},
}
JUDGED = ("equal", "near_tie", "different")
"""What an audit says of an answer that it could judge."""
RESULT = re.compile('result="([a-z_]+)"')
"""What an audit found, among the labels of a sample."""
OURS = {"cut", "status"}
"""What of a job the server does not get."""
TOOL = {"type": "function", "function": {"name": "plan_trip", "parameters": TRIP}}
Job = dict[str, Any]
Window = dict[str, float]


@dataclass
class Seen:
    """What clients and scrapes saw."""

    calls: int = 0
    refused: int = 0
    """Prompts too long, that were refused as they should."""
    wrong_calls: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    before: list[Window] = field(default_factory=list)
    """Those of an earlier run, whose beginning was at minute 0 of them."""
    gap: float = 0.0
    """Minutes from that beginning to ours."""

    @property
    def all_windows(self) -> list[Window]:
        """The windows of both runs on one clock."""
        moved = [{**one, "minute": one["minute"] + self.gap} for one in self.windows]
        return [*self.before, *moved]


def main(
    minutes: Annotated[float, typer.Option(help="Duration.")] = 9.0,
    hours: Annotated[float, typer.Option(help="Duration besides the minutes.")] = 0.0,
    url: Annotated[str | None, typer.Option(help="A server that runs. Default: one's own")] = None,
    jobs: Annotated[int, typer.Option(help="Requests of a window.")] = JOBS,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt; 0: all short.")] = 0,
    calls: Annotated[bool, typer.Option(help="Whether grammars force calls.")] = True,
    before: Annotated[Path | None, typer.Option(help="Result of an earlier run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Run the traffic and print what was found, window by window."""
    seconds = 60 * minutes + 3600 * hours
    about = begun("A server under the same mixed requests again and again", card.reading())
    setting = {"jobs": jobs, "clients": CLIENTS, "longest": longest, "calls": calls}
    seen = Seen() if before is None else continued(read(before), about["date"], setting)
    with written(out, about, UNITS, seconds=seconds, **setting) as write:
        with _server(url) as root:
            asyncio.run(_soak(root, seen, _jobs(jobs, calls), longest, seconds))
        total, problems = judged(seen)
        each = [Row(kind="window", **window) for window in seen.windows]
        told = [*notes(total), *(Row(kind="problem", told=one) for one in problems)]
        rows = [*each, total, *told]
        print(json.dumps(rows, indent=2))
        write(rows)
    raise typer.Exit(1 if problems else 0)


def continued(earlier: Result, date: str, setting: dict[str, Any]) -> Seen:
    """What an earlier run saw, before a run that begins at a date.

    Raises `InputError` where the earlier run's requests were others.
    """
    known = {"longest": 0, "calls": True, **earlier.setting}
    if other := sorted(name for name, value in setting.items() if known.get(name) != value):
        raise InputError(f"--before: that run had other {', '.join(other)}; repeat it as it was")
    rows = [row for row in earlier.rows if row["kind"] == "window"]
    windows = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in rows]
    gap = datetime.fromisoformat(date) - datetime.fromisoformat(earlier.date)
    return Seen(before=windows, gap=gap.total_seconds() / 60)


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


def _jobs(count: int, calls: bool = True) -> list[Job]:
    """The requests of every window."""
    draw = random.Random(0)
    last = "call" if calls else "greedy"
    kinds = [draw.choice(("greedy", "sampled", "sampled", "cut", last)) for _ in range(count)]
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


async def _lengthened(root: URL, jobs: list[Job], longest: int) -> list[Job]:
    """The jobs with prompts up to a length, and one above what the server takes."""
    [model, *_] = json.loads(await page(root, "/v1/models") or b"")["data"]
    context: int = model["max_model_len"]
    if longest >= context:
        raise InputError(f"--longest {longest}: the server's context is {context}; give less")
    lines = [await _tokenized(root, line) for line in LINES]
    return lengthened(jobs, lines, longest, context)


async def _tokenized(root: URL, text: str) -> list[int]:
    """The token ids of a text."""
    async with HttpSession(root) as connection:
        body = {"prompt": text, "add_special_tokens": False}
        answer = await connection.ask("POST", "/tokenize", json.dumps(body).encode())
        ids: list[int] = json.loads(await answer.body())["tokens"]
    return ids


def lengthened(
    jobs: Sequence[Job], lines: Sequence[Sequence[int]], longest: int, context: int
) -> list[Job]:
    """Jobs of which every fourth text is long, the first of them as long as may be; in the middle
    one that is above the context."""
    draw, changed = random.Random(1), list(jobs)
    places = [place for place, job in enumerate(jobs) if "prompt" in job][::EACH]
    for place in places:
        length = longest if place == places[0] else draw.randint(min(SHORT, longest), longest)
        changed[place] = {**jobs[place], "prompt": _drawn(lines, length, draw)}
    above = {"prompt": _drawn(lines, context + 1, draw), "max_tokens": 1, "status": 400}
    changed.insert(len(jobs) // 2, above)
    return changed


def _drawn(lines: Sequence[Sequence[int]], length: int, draw: random.Random) -> list[int]:
    """Token ids of drawn lines."""
    ids: list[int] = []
    while len(ids) < length:
        ids += draw.choice(lines)
    return ids[:length]


def salted(jobs: Sequence[Job], salt: str) -> Iterator[Job]:
    """The jobs, the long ones with keys and values that no other salt's find in a prefix cache."""
    for job in jobs:
        yield {**job, "cache_salt": salt} if isinstance(job.get("prompt"), list) else job


async def _soak(root: URL, seen: Seen, jobs: list[Job], longest: int, seconds: float) -> None:
    if longest:
        jobs = await _lengthened(root, jobs, longest)
    start = time.monotonic()
    while not seen.windows or time.monotonic() - start < seconds:
        before = await _scrape(root)
        left = salted(jobs, str(time.time()))
        await asyncio.gather(*(_client(root, left, seen) for _ in range(CLIENTS)))
        await _rest(root)
        after = await _scrape(root)
        minute = (time.monotonic() - start) / 60
        seen.windows.append(_window(before, after, minute) | _card())
        print(json.dumps(seen.windows[-1]), file=sys.stderr)


def _card() -> Window:
    """The memory in use of this machine's graphics card, if it has one."""
    used = card.reading().get("memory.used")
    return {"card_MB": round(used * 2**20 / 1e6, 1)} if isinstance(used, float) else {}


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
        seen.wrong_calls.append(text[:700])


async def _stream(root: URL, job: Job, seen: Seen) -> None:
    """A stream, perhaps one that its client leaves after some events, or that is refused."""
    wanted = job.get("status", 200)
    body = {name: value for name, value in job.items() if name not in OURS} | {"stream": True}
    async with HttpSession(root) as connection:
        answer = await connection.ask("POST", "/v1/completions", json.dumps(body).encode())
        if answer.status != wanted:
            told = (await answer.body()).decode()[:300] if answer.status != 200 else ""
            seen.failed.append(f"status {answer.status} in place of {wanted} {told}".strip())
        elif wanted == 200:
            await _read(answer, job["cut"], seen)
        else:
            seen.refused += 1


async def _read(answer: Reply, cut: int | None, seen: Seen) -> None:
    """Read a stream's events, at most so many."""
    events = 0
    async for event in answer.events():
        if "error" in event:
            seen.failed.append(str(event["error"]))
        events += 1
        if events == cut:
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
        "audited": int(sum(grown(f"peagle:audited_requests_total/{one}") for one in JUDGED)),
        "different": int(grown("peagle:audited_requests_total/different")),
    }


def judged(seen: Seen) -> tuple[Row, list[str]]:
    """The result of all windows, and what is wrong."""
    windows, summed = seen.all_windows, ("audited", "different", "preemptions")
    slopes = {"growth": slope(windows, "memory_MB"), "card_growth": slope(windows, "card_MB")}
    growths = {name: round(value, 3) for name, value in slopes.items() if value is not None}
    sums = {name: int(sum(one[name] for one in seen.windows)) for name in summed}
    counts = {"calls": seen.calls, "refused": seen.refused}
    wrong = {"wrong_calls": len(seen.wrong_calls), "failed": len(seen.failed)}
    total: Row = {"kind": "all", **growths, **sums, **counts, **wrong}
    return total, [*_drifts(windows, slopes), *_faults(seen, sums["different"])]


def slope(windows: Sequence[Window], name: str) -> float | None:
    """By how much a memory grows in a minute, after a third of the time; None: it is not known."""
    end = windows[-1]["minute"]
    late = [one for one in windows if name in one and one["minute"] >= end / 3]
    if len(late) < 3:
        return 0.0 if late else None
    return float(np.polyfit([one["minute"] for one in late], [one[name] for one in late], 1)[0])


def _drifts(windows: Sequence[Window], slopes: dict[str, float | None]) -> Iterator[str]:
    """What is no longer as it was at the beginning."""
    lengths = [one["acceptance_length"] for one in windows]
    few = max(len(lengths) // 10, 1)
    first, last = (round(fmean(some), 3) for some in (lengths[:few], lengths[-few:]))
    for name, whose in (("growth", "memory"), ("card_growth", "the card's memory")):
        if (slopes[name] or 0.0) > GROWTH:
            yield f"{whose} grows by {slopes[name]:.2f} MB a minute"
    if last < (1 - FALL) * first:
        yield f"the acceptance length fell from {first} to {last}"


def _faults(seen: Seen, different: int) -> Iterator[str]:
    """What is wrong with some answers."""
    if different:
        yield f"{different} audited answers differ"
    if seen.wrong_calls:
        yield f"calls do not parse: {seen.wrong_calls[:2]}"
    if seen.failed:
        yield f"requests failed: {seen.failed[:2]}"


def notes(total: Row) -> list[Row]:
    """What a result does not say anything about."""
    told = {"audited": "no answer was audited", "calls": "no call was forced by a grammar"}
    return [Row(kind="note", told=text) for name, text in told.items() if not total[name]]


if __name__ == "__main__":
    run(main)
