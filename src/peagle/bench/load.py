"""Load on an engine of this process: a fixed number of requests in flight."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from peagle.bench.case import Case, Setup
from peagle.bench.measures import measure
from peagle.bench.runs import Run
from peagle.completion import Completion, check_finished
from peagle.config import SamplingParams
from peagle.errors import InputError
from peagle.llm import LLM

WARM_UP_TOKENS = 16
Tick = Callable[[], None]
"""Called after each request."""


def _nothing(answer: str) -> None:
    """What follows an answer, if nothing does."""


@dataclass(frozen=True)
class Exchange:
    """A prompt's tokens, how they are continued, and what is asked next."""

    tokens: Sequence[int]
    params: SamplingParams
    then: "Callable[[str], Exchange | None]" = _nothing
    """What follows an answer's text: the next turn of a conversation."""
    turns: int = 1
    """Answers of the whole conversation."""
    longest: int = 0
    """Tokens of all its turns together without the answers; 0 is those of `tokens`."""

    @property
    def most_tokens(self) -> int:
        """Tokens of all turns and answers, at most."""
        return (self.longest or len(self.tokens)) + self.turns * self.params.max_tokens


class Workload(Protocol):
    """What all cases of a benchmark share."""

    def load(self, setups: Iterable[Setup]) -> None:
        """Load the weights that engines of these setups share. Raises `InputError`."""

    def open(self, setup: Setup, concurrency: int, shared: bool = False) -> LLM:
        """An engine for at most `concurrency` requests.

        shared: whether others are open beside it, so that it may hold no more than it needs.
        """

    def requests(self, case: Case, tokenizer: Any) -> list[Exchange]:
        """The requests of a case."""

    def place(self, case: Case, index: int) -> str:
        """How messages name a request."""


def drive(
    llm: LLM, requests: Sequence[Exchange], concurrency: int, on_finish: Tick = lambda: None
) -> list[Completion]:
    """Complete all requests, keeping `concurrency` of them in flight while enough are left.

    A request's next turn begins as soon as it is answered. The completions are in the order of the
    requests, each with those of its later turns behind it.
    """
    waiting = deque(enumerate(requests))
    running: dict[str, tuple[int, Exchange]] = {}
    done: list[list[Completion]] = [[] for _ in requests]
    while waiting or running:
        while waiting and len(running) < concurrency:
            index, request = waiting.popleft()
            prepared = llm.prepare(request.tokens, request.params)
            running[llm.submit(prepared, followed=False)] = index, request
        for chunk in llm.step():
            if chunk.completion is not None:
                index, request = running.pop(chunk.request_id)
                done[index].append(chunk.completion)
                follows = request.then(chunk.completion.text)
                if follows is not None:
                    waiting.appendleft((index, follows))
                else:
                    on_finish()
    return [completion for completions in done for completion in completions]


@dataclass(frozen=True)
class EngineCase:
    """A case that is ready to run: its warm engine and its requests."""

    case: Case
    llm: LLM
    requests: Sequence[Exchange]

    def run(self, on_finish: Tick = lambda: None) -> Run:
        """Complete all requests once; calls `on_finish` after each. Raises `InputError`."""
        start, own_start = time.perf_counter(), time.thread_time()
        completions = drive(self.llm, self.requests, self.case.concurrency, on_finish)
        seconds, own = time.perf_counter() - start, time.thread_time() - own_start
        check_finished(completions)
        most_at_once = min(self.case.concurrency, len(self.requests))
        return Run(
            self.case,
            measure(completions, seconds),
            tuple(completion.token_ids for completion in completions),
            core_share=None if self.llm.engine.runs_ahead else own / seconds,
            branches=0 < most_at_once <= self.llm.engine.facts.most_trees,
        )


def open_case(workload: Workload, llm: LLM, case: Case) -> EngineCase:
    """Warm up `llm` for a case. Raises `InputError` if the longest conversation does not fit."""
    requests = workload.requests(case, llm.tokenizer)
    _check_length(llm, workload, case, requests)
    first = [_first_tokens(request) for request in requests[: case.concurrency]]
    check_finished(drive(llm, first, case.concurrency))
    return EngineCase(case, llm, requests)


def _first_tokens(request: Exchange) -> Exchange:
    few = {"max_tokens": min(WARM_UP_TOKENS, request.params.max_tokens)}
    return replace(request, params=request.params.model_copy(update=few), then=_nothing)


def _check_length(llm: LLM, workload: Workload, case: Case, requests: Sequence[Exchange]) -> None:
    longest = max(requests, key=lambda request: request.most_tokens)
    if longest.most_tokens > llm.engine.max_length:
        to_follow = longest.turns * longest.params.max_tokens
        raise InputError(
            f"{workload.place(case, requests.index(longest))} has "
            f"{longest.most_tokens - to_follow} tokens and {to_follow} are to follow, but the "
            f"context holds {llm.engine.max_length}; lower --max-tokens or shorten the prompt"
        )
