"""Load: a fixed number of requests in flight, greedy, the same outputs for every case."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from peagle.bench.measures import Measures, measure
from peagle.bench.pair import METHODS, Pair
from peagle.bench.prompts import Prompt
from peagle.config import DType, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.errors import InputError
from peagle.llm import LLM, Completion, check_finished

WARM_UP_TOKENS = 16
Request = tuple[Sequence[int], SamplingParams]
"""A prompt's tokens, and how they are continued."""


@dataclass(frozen=True)
class Case:
    """What is run: none, eagle3 or peagle with `k` drafts (0 for none), `concurrency` at a time."""

    method: str
    k: int
    concurrency: int


@dataclass(frozen=True)
class Run:
    """A case, its measures and its outputs."""

    case: Case
    measures: Measures
    outputs: tuple[tuple[int, ...], ...]
    """Token ids of each prompt's output."""
    identical_to_none: bool | None
    """Whether every output equals the one without speculation; None where that was not run."""
    rounds: tuple[float, ...] = ()
    """OTPS of every round; this run is the median one."""
    core_share: float | None = None
    """Share of its time in which this thread had a core; None where it waits for a GPU."""

    def as_json(self) -> dict[str, Any]:
        """The run as an entry of the result file."""
        others = {"identical_to_none": self.identical_to_none, "rounds": self.rounds}
        return {**asdict(self.case), **asdict(self.measures), **others}


class Workload(Protocol):
    """What all cases of a benchmark share."""

    @property
    def max_tokens(self) -> int:
        """Most output tokens of a request."""
        ...

    @property
    def rounds(self) -> int:
        """Number of runs of each case; the median is kept."""
        ...

    @property
    def comparable(self) -> bool:
        """Whether all cases have the same prompts, and should have the same outputs."""
        ...

    def open(self, method: str, k: int, concurrency: int) -> LLM:
        """The engine for a method, for at most `k` drafts and `concurrency` requests."""
        ...

    def requests(self, case: Case, tokenizer: Any) -> list[Request]:
        """The requests of a case."""
        ...

    def place(self, index: int) -> str:
        """How messages name a request."""
        ...


@dataclass(frozen=True)
class PromptWorkload:
    """The same models, prompts and lengths of outputs for every case."""

    pair: Pair
    prompts: tuple[Prompt, ...]
    max_tokens: int
    dtype: DType = "auto"
    device: str = "auto"
    rounds: int = 1
    comparable: bool = True

    def __post_init__(self) -> None:
        self.params(0, ())  # refuses an invalid number before anything runs

    def params(self, k: int, stop: tuple[str, ...]) -> SamplingParams:
        """Greedy, and ending at the same place, so that all cases do the same work.

        Without stop texts that is `max_tokens`: the end of a text is ignored.
        """
        return SamplingParams(
            max_tokens=self.max_tokens, stop=stop, ignore_eos=not stop, num_speculative_tokens=k
        )

    def requests(self, case: Case, tokenizer: Any) -> list[Request]:
        """All prompts, whatever the case."""
        return [
            (prompt.token_ids(tokenizer), self.params(case.k, prompt.stop))
            for prompt in self.prompts
        ]

    def place(self, index: int) -> str:
        """The prompt's file and line."""
        return self.prompts[index].place

    def open(self, method: str, k: int, concurrency: int) -> LLM:
        """The engine for a method that drafts exactly `k` tokens.

        Without prefix caching, so that no case profits from an earlier one's prompts.
        """
        config = EngineConfig(
            dtype=self.dtype,
            device=self.device,
            max_num_seqs=concurrency,
            enable_prefix_caching=False,
            draft_length="fixed",
        )
        if method == "none":
            return LLM(self.pair.target, None, config)
        speculation = SpeculativeConfig(
            model=self.pair.drafters[method],
            num_speculative_tokens=k,
            parallel_drafting=method == "peagle",
        )
        return LLM(self.pair.target, speculation, config)


def list_cases(
    methods: Iterable[str], ks: Sequence[int], concurrencies: Sequence[int]
) -> list[Case]:
    """Every combination, `none` first and without a K, since the others are compared with it."""
    ordered = sorted(set(methods), key=METHODS.index)
    return [
        Case(method, k, concurrency)
        for method in ordered
        for k in ((0,) if method == "none" else ks)
        for concurrency in concurrencies
    ]


def run_cases(
    workload: Workload, cases: Iterable[Case], on_finish: Callable[[], None] = lambda: None
) -> Iterator[Run]:
    """Run cases; those of one method and K share an engine. Calls `on_finish` after each request.

    Raises `InputError` before a case runs whose longest prompt does not fit.
    """
    reference: tuple[tuple[int, ...], ...] | None = None
    for (method, k), same in itertools.groupby(cases, key=lambda case: (case.method, case.k)):
        for run in _run_method(workload, method, k, list(same), on_finish):
            if workload.comparable and method == "none" and reference is None:
                reference = run.outputs
            identical = None if reference is None else run.outputs == reference
            yield replace(run, identical_to_none=identical)


def median_run(runs: Sequence[Run]) -> Run:
    """A case's median run of several rounds, with the speeds of all of them."""
    ordered = sorted(runs, key=lambda run: run.measures.otps)
    verdicts = {run.identical_to_none for run in runs}
    shares = [run.core_share for run in runs if run.core_share is not None]
    return replace(
        ordered[len(ordered) // 2],
        identical_to_none=None if None in verdicts else all(verdicts),
        rounds=tuple(run.measures.otps for run in runs),
        core_share=statistics.median(shares) if shares else None,
    )


def drive(
    llm: LLM,
    requests: Sequence[Request],
    concurrency: int,
    on_finish: Callable[[], None] = lambda: None,
) -> list[Completion]:
    """Complete all requests, keeping `concurrency` of them in flight while enough are left."""
    waiting = iter(enumerate(requests))
    running: dict[str, int] = {}
    done: dict[int, Completion] = {}
    while len(done) < len(requests):
        for index, (prompt, params) in itertools.islice(waiting, concurrency - len(running)):
            running[llm.submit(llm.prepare(prompt, params))] = index
        for chunk in llm.step():
            if chunk.completion is not None:
                done[running.pop(chunk.request_id)] = chunk.completion
                on_finish()
    return [done[index] for index in range(len(requests))]


@dataclass(frozen=True)
class OpenCase:
    """A case that is ready to run: its warm engine and its requests."""

    case: Case
    llm: LLM
    requests: Sequence[Request]

    def run(self, on_finish: Callable[[], None] = lambda: None) -> Run:
        """Complete all requests once; calls `on_finish` after each."""
        start, own_start = time.perf_counter(), time.thread_time()
        completions = drive(self.llm, self.requests, self.case.concurrency, on_finish)
        seconds, own = time.perf_counter() - start, time.thread_time() - own_start
        check_finished(completions)
        return Run(
            self.case,
            measure(completions, seconds),
            tuple(completion.token_ids for completion in completions),
            identical_to_none=None,
            core_share=None if self.llm.engine.runs_ahead else own / seconds,
        )


def open_case(workload: Workload, llm: LLM, case: Case) -> OpenCase:
    """Warm up `llm` for a case. Raises `InputError` if the longest prompt does not fit."""
    requests = workload.requests(case, llm.tokenizer)
    _check_length(llm, workload, [len(prompt) for prompt, _ in requests])
    few = {"max_tokens": min(WARM_UP_TOKENS, workload.max_tokens)}
    first = [(prompt, params.model_copy(update=few)) for prompt, params in requests]
    check_finished(drive(llm, first[: case.concurrency], case.concurrency))
    return OpenCase(case, llm, requests)


def _run_method(
    workload: Workload, method: str, k: int, cases: list[Case], on_finish: Callable[[], None]
) -> Iterator[Run]:
    llm = workload.open(method, k, max(case.concurrency for case in cases))
    for case in cases:
        ready = open_case(workload, llm, case)
        runs = [ready.run(on_finish) for _ in range(workload.rounds)]
        yield median_run(runs)


def _check_length(llm: LLM, workload: Workload, lengths: Sequence[int]) -> None:
    longest = max(lengths)
    if longest + workload.max_tokens > llm.engine.max_length:
        raise InputError(
            f"{workload.place(lengths.index(longest))} has {longest} tokens and "
            f"{workload.max_tokens} are to follow, but the context holds {llm.engine.max_length}; "
            "lower --max-tokens or shorten the prompt"
        )
