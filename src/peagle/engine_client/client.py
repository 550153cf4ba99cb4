"""What `LLM` has of an engine, wherever it runs."""

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from peagle.config import SamplingParams
from peagle.engine.engine import EngineFacts, EngineStats
from peagle.engine.request import RequestOutput
from peagle.engine_client.form import Form


class EngineStepError(Exception):
    """A step failed, and all requests with it; the engine goes on."""


class EngineClient(ABC):
    """Requests in, outputs out, all of it plain data.

    One thread adds, aborts and steps; any thread may call `compile` and `wake`, and read the
    facts and stats.
    """

    in_process: ClassVar[bool]
    """Whether steps run in this process, within `step`, and keep its interpreter."""

    def __init__(self, facts: EngineFacts, pid: int | None = None) -> None:
        self.facts, self.pid = facts, pid or os.getpid()
        """And the process in which steps run, or that is in front of several of them."""
        self.ids: Iterator[str] = map(str, itertools.count())
        """Of requests, none of them given twice."""
        self.vocab_size, self.end_tokens = facts.vocab_size, facts.end_tokens
        self.max_length, self.max_num_seqs = facts.max_length, facts.max_num_seqs
        self.k, self.runs_ahead = facts.k, facts.runs_ahead

    @property
    def replicas(self) -> "Sequence[EngineClient]":
        """The engines that run requests, each of which has facts and stats of its own."""
        return (self,)

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """How busy the engine is, and what it has done so far."""

    @property
    @abstractmethod
    def step_age(self) -> float:
        """Seconds for which the present step runs; 0 between steps."""

    @property
    def responds(self) -> bool:
        """Whether it steps, or could: no step is stuck."""
        return self.step_age <= self.facts.step_timeout

    @abstractmethod
    def watch(self, give_up: Callable[[], object]) -> None:
        """Have `give_up` called, from another thread, once a step is stuck in this process; an
        engine elsewhere watches itself."""

    @abstractmethod
    def kill(self) -> None:
        """End what runs elsewhere at once, whatever it does; from any thread."""

    @abstractmethod
    def compile(self, form: Form) -> None:
        """Compile a form before its request is added. Raises `InputError` for a wrong one."""

    @abstractmethod
    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, form: Form | None
    ) -> int:
        """Queue a request; returns the index of the replica that runs it. Raises `InputError` when
        it cannot be run as asked."""

    @abstractmethod
    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request now; unknown and finished ids are ignored."""

    @abstractmethod
    def step(self) -> list[RequestOutput]:
        """What requests got by one step, in one piece; from another process, by all that it ran
        since the last call: those who read late have fewer and longer pieces.

        Where it raises, all requests have to be aborted; after `EngineDeadError` there is no going
        on.
        """

    @abstractmethod
    def wake(self) -> None:
        """Let a `step` that waits for another process return."""

    @abstractmethod
    def close(self) -> None:
        """End what runs elsewhere."""
