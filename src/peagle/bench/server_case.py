"""Cases that a server runs: requests in flight, or requests a second.

One process reads some 20,000 events a second, which a server may send faster to hundreds of
clients: where there are cores enough, several processes share the requests in flight.
"""

import asyncio
import itertools
import multiprocessing
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace

from peagle.bench.case import Case
from peagle.bench.http import HttpSession
from peagle.bench.load import WARM_UP_TOKENS, Tick
from peagle.bench.measures import Acceptance, measured
from peagle.bench.prompts import Prompt
from peagle.bench.rounds import take_turns
from peagle.bench.runs import Failure, Run
from peagle.bench.server import Observation, RequestFailedError, Server, most_common
from peagle.config import SamplingParams
from peagle.errors import InputError

Asked = tuple[Prompt, SamplingParams]
CLIENTS, CORES = 64, 4
"""Requests in flight of a process that asks, at least, and cores of the machine for each."""


@dataclass(frozen=True)
class ServerCase:
    """A case that is ready to run: a warm server and its requests."""

    case: Case
    server: Server
    asked: Sequence[Asked]
    loop: asyncio.Runner
    pool: ProcessPoolExecutor

    def run(self, on_finish: Tick = lambda: None) -> Run:
        """Ask everything once; calls `on_finish` after each conversation.

        Raises `InputError` if no request gets an answer.
        """
        return self.loop.run(self._run(on_finish))

    async def _run(self, on_finish: Tick) -> Run:
        before = await self.server.draft_counts()
        done = Conversations(self.server, self.asked, uuid.uuid4().hex, on_finish)
        start = time.perf_counter()
        if self.case.request_rate:
            await done.at_rate(self.case.request_rate)
        else:
            await done.in_flight_among(self.pool, self.case.concurrency)
        seconds = time.perf_counter() - start
        after = await self.server.draft_counts()
        accepted = after.since(before) if before and after else None
        return self._measured(done, accepted, seconds)

    def _measured(self, done: "Conversations", accepted: Acceptance | None, seconds: float) -> Run:
        answers = [answer for each in done.answers for answer in each]
        if not answers:
            raise InputError(most_common(done.failed.values()))
        if done.failed:
            asked = len(self.asked)
            why = most_common(done.failed.values())
            self.server.note(f"failed {len(done.failed)} of {asked} requests: {why}")
        if done.ended_early:
            self.server.note("does not heed ignore_eos: answers have different lengths")
        return Run(
            self.case,
            measured([answer.times for answer in answers], accepted, seconds),
            tuple(
                None if index in done.failed else tuple(answer.text for answer in each)
                for index, each in enumerate(done.answers)
            ),
            failed=len(done.failed),
        )


@dataclass
class Conversations:
    """What is asked of a server, and what became of it."""

    server: Server
    asked: Sequence[Asked]
    salt: str
    on_finish: Tick = lambda: None
    answers: list[list[Observation]] = field(default_factory=list)
    """The answers of each conversation, in the order of `asked`."""
    failed: dict[int, str] = field(default_factory=dict)
    """Which failed, and why."""
    ended_early: bool = False
    """Whether an answer ended before its limit though the end of text was to be ignored."""

    def __post_init__(self) -> None:
        self.answers = [[] for _ in self.asked]

    async def in_flight(self, concurrency: int) -> None:
        """Keep so many conversations going while enough are left, each on a connection."""
        waiting = iter(range(len(self.asked)))

        async def work(connection: HttpSession) -> None:
            for index in waiting:
                await self._converse(connection, index)

        with ExitStack() as stack:
            lines = [closing(self.server.connect()) for _ in range(concurrency)]
            await asyncio.gather(*(work(stack.enter_context(line)) for line in lines))

    async def in_flight_among(self, pool: ProcessPoolExecutor, concurrency: int) -> None:
        """The same, by several processes where they are so many; each has every so many-th."""
        count = processes_for(concurrency)
        if count == 1:
            await self.in_flight(concurrency)
            return
        loop, parts = asyncio.get_running_loop(), []
        for place in range(count):
            asked, lines = self.asked[place::count], len(range(place, concurrency, count))
            given = self.server, asked, self.salt, lines
            parts.append(loop.run_in_executor(pool, asked_alone, *given))
        for place, part in enumerate(parts):
            answers, failed, ended_early = await part
            self.answers[place::count] = answers
            self.failed |= {place + count * index: why for index, why in failed.items()}
            self.ended_early |= ended_early
            for _ in answers:
                self.on_finish()

    async def at_rate(self, rate: float) -> None:
        """Begin a conversation at random times, so many a second on average (Poisson).

        Times count from when one was due: a client that is late must not flatter the server.
        """
        draw = random.Random(0)
        due = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self.asked)):
                await asyncio.sleep(max(due - time.perf_counter(), 0.0))
                tasks.create_task(self._alone(index, due))
                due += draw.expovariate(rate)

    async def _alone(self, index: int, due: float) -> None:
        with closing(self.server.connect()) as connection:
            await self._converse(connection, index, due)

    async def _converse(
        self, connection: HttpSession, index: int, due: float | None = None
    ) -> None:
        """All turns of a conversation, of which the first was due then."""
        prompt: Prompt | None
        prompt, params = self.asked[index]
        try:
            while prompt is not None:
                answer = await self.server.answer(connection, prompt, params, self.salt, due)
                due = None
                self.answers[index].append(answer)
                short = answer.counted and len(answer.times) < params.max_tokens
                left_out = "ignore_eos" in self.server.refused
                self.ended_early |= params.ignore_eos and short and not left_out
                prompt = prompt.after(answer.content)
        except (RequestFailedError, InputError) as error:
            self.failed[index] = str(error)
        self.on_finish()


def processes_for(concurrency: int) -> int:
    """How many processes keep so many requests in flight."""
    return max(min(concurrency // CLIENTS, (os.cpu_count() or 1) // CORES), 1)


def asked_alone(
    server: Server, asked: Sequence[Asked], salt: str, concurrency: int
) -> tuple[list[list[Observation]], dict[int, str], bool]:
    """A process's part of `Conversations`: answers, failures, and whether any ended early."""
    done = Conversations(server, asked, salt)
    asyncio.run(done.in_flight(concurrency))
    return done.answers, done.failed, done.ended_early


@contextmanager
def processes(most: int) -> Iterator[ProcessPoolExecutor]:
    """At most so many processes, begun when they are first asked; none is left behind."""
    before = multiprocessing.active_children()
    # Ctrl-C reaches all processes of a terminal: this one alone heeds it, and ends the others
    ignoring = signal.signal, (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(most, multiprocessing.get_context("spawn"), *ignoring)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            if child not in before:
                child.terminate()
                child.join()


def find_servers(urls: Sequence[tuple[str, str]], model: str | None) -> list[Server]:
    """The servers of some names and URLs. Raises `InputError` for one that does not answer."""

    async def find() -> list[Server]:
        return [await Server.find(name, url, model) for name, url in urls]

    return asyncio.run(find())


def run_servers(
    servers: Sequence[Server],
    cases: Sequence[Case],
    asked: Callable[[Case], Sequence[Asked]],
    rounds: int,
    on_finish: Tick = lambda: None,
    warn: Callable[[str], None] = lambda _: None,
) -> Iterator[Run | Failure]:
    """Let cases take turns on servers.

    asked: a case's requests. `warn` is told what a reader must know, before the first run and after
    each. Raises `InputError` before it if a server answers nothing.
    """
    by_name = {server.name: server for server in servers}
    most = max(processes_for(case.concurrency) for case in cases)
    with processes(most) as pool, asyncio.Runner() as loop:
        ready = [ServerCase(case, by_name[case.method], asked(case), loop, pool) for case in cases]
        loop.run(_warm_up(ready))
        for done in itertools.chain([None], take_turns(ready, rounds, on_finish)):
            for note in [note for server in servers for note in server.notes]:
                warn(note)
            if done is not None:
                yield done


async def _warm_up(ready: Sequence[ServerCase]) -> None:
    """Learn what each server takes, then keep it as busy as each case will."""
    for server in {id(one.server): one.server for one in ready}.values():
        first = [one for one in ready if one.server is server]
        await server.learn(*_first_tokens(first[0].asked[0]))
        for one in first:
            few = one.asked[: one.case.concurrency or 1]
            done = Conversations(server, [*map(_first_tokens, few)], "warm-up")
            await done.in_flight_among(one.pool, len(few))


def _first_tokens(asked: Asked) -> Asked:
    prompt, params = asked
    few = {"max_tokens": min(WARM_UP_TOKENS, params.max_tokens)}
    return replace(prompt, later=()), params.model_copy(update=few)
