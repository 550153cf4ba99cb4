"""Several engines as one: replicas of the same pair, each in a process of its own."""

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from multiprocessing import connection

import torch

from peagle.config import SamplingParams
from peagle.device import resolve_device
from peagle.engine.engine import EngineDeadError, EngineStats
from peagle.engine.request import RequestOutput
from peagle.engine_client.client import EngineClient, EngineStepError
from peagle.engine_client.form import Form
from peagle.engine_client.prefix_owners import PrefixOwners
from peagle.engine_client.process import THREADS, WAIT, EngineProcess, settle
from peagle.engine_client.source import EngineSource
from peagle.errors import InputError

SLACK, SHARE = 4, 1.25
"""An engine that knows a prompt's beginning gets it unless it has more than so many requests beyond
this multiple of the least that any has."""
PAUSE = 30.0
"""Seconds between two attempts to start an engine again."""
LOST = "the engine of this request ended; try again"
"""The failure of a request that another engine would serve."""
FAILED = "a step of this request's engine failed; the server's log says why"
VISIBLE = "CUDA_VISIBLE_DEVICES"
log = logging.getLogger("peagle.engine")


class Replicas(EngineClient):
    """Engines of one source, each in a process of its own; on GPUs each has one for itself.

    Seeds are given out here, so that the engine that a request gets changes none of its tokens. An
    engine that ends fails its own requests, and is started again while the others go on. Raises
    `InputError` as `EngineProcess` does, and for more engines than GPUs.
    """

    in_process = False

    def __init__(self, source: EngineSource, count: int) -> None:
        self._starts: list[Callable[[], EngineProcess]] = _starts(source, count)
        first = self._starts[0]()  # it compiles kernels and reads the files for all others
        with ThreadPoolExecutor(count) as together:
            self._engines = [first, *together.map(lambda start: start(), self._starts[1:])]
        super().__init__(first.facts)
        self.max_num_seqs = sum(engine.max_num_seqs for engine in self._engines)
        self._owners: dict[str, int] = {}
        """The engine of each request that runs."""
        self._prefixes = PrefixOwners()
        self._added, self._last = 0, [0] * count
        """Requests so far, and how many there were when each engine got its newest one."""
        self._started: deque[tuple[int, EngineProcess]] = deque()
        """Engines that were started again."""
        self._is_lost = False
        """Whether none runs, and one could not be started again."""
        self._closing = threading.Event()

    @property
    def replicas(self) -> Sequence[EngineProcess]:
        return self._engines

    @property
    def stats(self) -> EngineStats:
        """Their sums, and the fullest cache."""
        return EngineStats.pooled([engine.stats for engine in self._engines])

    @property
    def step_age(self) -> float:
        return max(engine.step_age for engine in self._engines)

    @property
    def responds(self) -> bool:
        """Whether any of them does."""
        return any(engine.responds for engine in self._engines)

    def watch(self, give_up: Callable[[], object]) -> None:
        """Nothing: each process watches itself, and `step` whether it is heard."""

    def compile(self, form: Form) -> None:
        """On all of them, since any may get the request; one that is stuck is not waited for."""
        if form.grammar is None:
            return
        asked = {engine.ask(form): engine for engine in self._engines if engine.responds}
        while late := [one for one, engine in asked.items() if engine.responds and not one.done()]:
            wait(late, WAIT)
        answers = [one for one in asked if one.done() and one.exception() is None]
        if not answers:
            raise EngineStepError(FAILED)
        for answer in answers:
            settle(answer)

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, form: Form | None
    ) -> int:
        if params.seed is None:
            params = params.model_copy(update={"seed": self.facts.seed + self._added})
        index = self._choose(prompt, params.cache_salt)
        self._owners[request_id] = index
        if params.unrecorded_from is None:  # others fill no prefix cache
            self._added += 1
            self._prefixes.give(prompt, params.cache_salt, index)
        self._last[index] = self._added
        self._engines[index].add(request_id, prompt, params, form)
        return index

    def abort(self, request_id: str, reason: str = "abort") -> None:
        if (index := self._owners.pop(request_id, None)) is not None:
            self._engines[index].abort(request_id, reason)

    def step(self) -> list[RequestOutput]:
        """Wait for what any of them brings. Raises `EngineDeadError` once none runs and one could
        not be started again."""
        if self._is_lost:
            raise EngineDeadError("no engine is left, and one could not be started again")
        outputs: list[RequestOutput] = []
        while self._started:
            index, engine = self._started.popleft()
            outputs += self._fail(index, LOST)  # what came after it had ended
            self._engines[index].close()
            self._engines[index] = engine
            log.info(f"engine {index} serves again")
        connection.wait([engine for engine in self._engines if not engine.ended], WAIT)
        for index, engine in enumerate(self._engines):
            outputs += self._step(index, engine)
        return outputs

    def wake(self) -> None:
        for engine in self._engines:
            engine.wake()

    def kill(self) -> None:
        self._closing.set()
        for engine in self._engines:
            engine.kill()

    def close(self) -> None:
        """End all processes, and wait for them."""
        self._closing.set()
        for engine in (*self._engines, *(one for _, one in list(self._started))):
            engine.close()

    def _choose(self, prompt: Sequence[int], salt: str | None) -> int:
        """The engine that knows most of a prompt, unless it has too much to do; else the one with
        the least to do, of equals the one that got its newest request first."""
        loads = Counter(self._owners.values())
        every = range(len(self._engines))
        takers = [index for index in every if self._engines[index].takes]
        takers = takers or [index for index in every if self._engines[index].responds] or [*every]
        owner = self._prefixes.find(prompt, salt)
        most = SHARE * min(loads[index] for index in takers) + SLACK
        if owner is not None and owner in takers and loads[owner] <= most:
            return owner
        return min(takers, key=lambda index: (loads[index], self._last[index]))

    def _step(self, index: int, engine: EngineProcess) -> list[RequestOutput]:
        """What one of them has brought; where it failed, the ends of its requests."""
        if engine.ended:
            return self._fail(index, LOST)
        try:
            outputs = engine.step(0)
        except EngineStepError:
            log.exception(f"a step of engine {index} failed")
            return self._fail(index, FAILED)
        except EngineDeadError:
            log.exception(f"engine {index} is started again")
            threading.Thread(target=self._start_again, args=(index,), daemon=True).start()
            return self._fail(index, LOST)
        for output in outputs:
            if output.finish_reason is not None:
                self._owners.pop(output.request_id, None)
        return outputs

    def _fail(self, index: int, why: str) -> list[RequestOutput]:
        """End an engine's requests with an error."""
        lost = [request_id for request_id, owner in self._owners.items() if owner == index]
        for request_id in lost:
            self.abort(request_id)
        return [RequestOutput(one, (), 0, "error", failure=why) for one in lost]

    def _start_again(self, index: int) -> None:
        """Start an engine in place of one that ended; from a thread of its own."""
        while not self._closing.is_set():
            try:
                engine = self._starts[index]()
                self._started.append((index, engine))
                if self._closing.is_set():  # perhaps after `close` had looked
                    engine.close()
                break
            except Exception as error:
                told = f"engine {index} does not start, and is tried again in {PAUSE:g} s: {error}"
                if not self._closing.is_set():
                    log.error(told)
            self._is_lost = not self._started and all(engine.ended for engine in self._engines)
            self._closing.wait(PAUSE)
        if not self._closing.is_set():
            self.wake()


def _starts(source: EngineSource, count: int) -> list[Callable[[], EngineProcess]]:
    """What starts each engine. Raises `InputError` where they cannot have a GPU each."""
    device = resolve_device(source.config.device)
    if device.type == "cpu":
        share = max(torch.get_num_threads() // count, 1)
        return [partial(EngineProcess, source, {THREADS: str(share)})] * count
    if device.index is not None:
        raise InputError(f"{count} engines on {device} alone; leave its number out")
    if (there := torch.cuda.device_count()) < count:
        raise InputError(f"{count} engines need a GPU each, and torch sees {there}; give fewer")
    visible = os.environ.get(VISIBLE) or ",".join(map(str, range(count)))
    each = visible.split(",")[:count]
    return [partial(EngineProcess, source, {VISIBLE: one}) for one in each]
