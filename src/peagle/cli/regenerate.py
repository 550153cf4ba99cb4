"""`peagle regenerate`: a target's own answers to the prompts of a data set."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from peagle.cli.groups import fields
from peagle.cli.interrupts import at_once
from peagle.cli.loading import choose_speculation, open_async_llm
from peagle.cli.options import (
    SAMPLING,
    SIZES,
    Drafting,
    DraftingFlags,
    Hardware,
    TargetFlag,
    Threads,
    from_flags,
    use_threads,
)
from peagle.cli.progress import run_bar
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.regenerate.answers import Answerer
    from peagle.regenerate.run import Conversation, Outcome

    Run = Callable[[Answerer], Coroutine[None, None, None]]

EXAMPLE = """\b
Examples:
  peagle regenerate ./target chats.jsonl --output answers.jsonl
  peagle regenerate ./target hf:owner/name:train --limit 1000 --output answers.jsonl
  peagle regenerate chats.jsonl --endpoint URL --model NAME --output answers.jsonl"""
KEY = "OPENAI_API_KEY"
SAMPLED = {name: SAMPLING[name] for name in ("max_tokens", "temperature", "seed")}
Sampling = Annotated[dict[str, Any], fields(SamplingParams, SAMPLED, max_tokens=2048, seed=0)]
Length = Annotated[dict[str, Any], fields(EngineConfig, {"max_model_len": SIZES["max_model_len"]})]


def regenerate(
    *,
    target: Annotated[
        str | None,
        typer.Argument(
            help="Target model: directory or hub id; not with --target or --endpoint.",
            show_default=False,
        ),
    ] = None,
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Conversations: JSONL files, or hf:ID_OR_PATH[:SPLIT] for datasets."),
    ] = None,
    target_flag: TargetFlag = None,
    output: Annotated[
        Path,
        typer.Option(help="JSONL file; an existing one gets the answers it lacks."),
    ],
    drafting: DraftingFlags,
    sampling: Sampling,
    concurrency: Annotated[int, typer.Option(help="Conversations in flight.")] = 32,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Use only this many conversations, the first ones.", show_default="all of them"
        ),
    ] = None,
    length: Length,
    hardware: Hardware,
    threads: Threads = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help=f"OpenAI-compatible URL to ask instead of a target; key from {KEY}."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name at the endpoint.")] = None,
) -> None:
    """Write the target's own answer to every question.

    The answers in the data are ignored. The same command continues a stopped run, also with edited
    data.
    """
    from peagle.regenerate.output import open_output
    from peagle.regenerate.run import read_conversations
    from peagle.regenerate.run import regenerate as answer

    with from_flags(max_num_seqs="--concurrency"):
        params = SamplingParams(**sampling)
        config = EngineConfig(**length, **hardware, max_num_seqs=concurrency)
    _check_endpoint(endpoint, model, target_flag, drafting)
    words = [word for word in (target, *(sources or [])) if word is not None]
    place, given = _target_and_sources(words, target_flag, endpoint)
    speculation = choose_speculation(place, drafting) if place else None
    conversations = read_conversations(given, limit)
    use_threads(threads)
    by = _answered_by(model or str(Path(place)), params)
    with open_output(output, by, with_ids=endpoint is None) as file:
        waiting = {asked: one for asked, one in conversations.items() if asked not in file.done}
        tally = Tally(len(conversations) - len(waiting), len(file.done - conversations.keys()))

        async def run(answerer: "Answerer") -> None:
            with _progress(tally, len(conversations)) as show:
                await answer(waiting, answerer, params, file, concurrency, show)

        if endpoint is not None and model is not None:
            _ask_endpoint(run, endpoint, model, concurrency)
        elif waiting:
            _ask_engine(run, waiting.values(), place, speculation, config)
    if tally.skipped and not tally.before and not tally.finished:
        raise InputError(f"no conversation was answered: {tally.problem}")
    typer.echo(tally)


class Tally:
    """What a run has done so far, and how fast."""

    def __init__(self, before: int, others: int) -> None:
        self.before, self.others = before, others
        """Conversations that an earlier run finished, and those in the file but not in the data."""
        self.finished = self.tokens = self.shortened = self.skipped = self.cut = 0
        self.problem: str | None = None
        """Why the first conversation that ends early does so."""
        self._start = time.perf_counter()

    def start(self) -> None:
        """Measure speed from now on."""
        self._start = time.perf_counter()

    def add(self, outcome: "Outcome") -> None:
        """Count a conversation."""
        self.finished += outcome.record is not None
        self.tokens += outcome.tokens
        self.shortened += outcome.record is not None and outcome.problem is not None
        self.skipped += outcome.record is None
        self.cut += outcome.cut
        self.problem = self.problem or outcome.problem

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / max(time.perf_counter() - self._start, 1e-9)

    def __str__(self) -> str:
        counts = (
            (self.before, "were there already"),
            (self.others, "that are not in this data stay"),
            (self.shortened, "end early"),
            (self.skipped, "left out"),
            (self.cut, "of these at an answer that --max-tokens or the context's end cut"),
        )
        speed = f"{self.tokens} tokens, {self.speed:.1f} tokens/s"
        lines = [f"{self.finished} conversations, {speed}"]
        lines += [f"{count} {what}" for count, what in counts if count]
        return "\n".join([*lines, f"first problem: {self.problem}"] if self.problem else lines)


def _check_endpoint(
    endpoint: str | None, model: str | None, target: str | None, drafting: Drafting
) -> None:
    if (endpoint is None) != (model is None):
        raise InputError("--endpoint and --model go together")
    if endpoint is not None and (target is not None or drafting != Drafting()):
        raise InputError("--endpoint has its own models; leave out --target and --drafter")


def _target_and_sources(
    words: Sequence[str], target: str | None, endpoint: str | None
) -> tuple[str, Sequence[str]]:
    """The target, empty with an endpoint, and the sources: all words but an unflagged target."""
    if endpoint is None and target is None:
        if not words:
            raise InputError("no target: give TARGET or --target, then the conversations' files")
        target, *words = words
    if not words:
        named = f"{target} is the target; " if target else ""
        raise InputError(f"{named}name the conversations' files")
    return target or "", words


def _answered_by(name: str, params: SamplingParams) -> str:
    """What distinguishes a run's answers; a finished answer is the same for any --max-tokens."""
    sampled = f"temperature {params.temperature}, seed {params.seed}"
    return f"{name}, {sampled if params.temperature else 'greedy'}"


def _ask_engine(
    run: "Run",
    conversations: "Iterable[Conversation]",
    target: str,
    speculation: SpeculativeConfig | None,
    config: EngineConfig,
) -> None:
    from peagle.regenerate.engine import EngineAnswerer
    from peagle.regenerate.run import check_templates

    llm = open_async_llm(target, speculation, config)
    try:
        answerer = EngineAnswerer(llm)
        check_templates(conversations, answerer.render)
        asyncio.run(run(answerer))
    finally:
        llm.close()


def _ask_endpoint(run: "Run", url: str, model: str, connections: int) -> None:
    with at_once():
        from peagle.regenerate.endpoint import open_endpoint

    async def ask() -> None:
        async with open_endpoint(url, model, os.environ.get(KEY), connections) as answerer:
            await run(answerer)

    asyncio.run(ask())


@contextmanager
def _progress(tally: Tally, total: int) -> "Iterator[Callable[[Outcome], None]]":
    """A bar on stderr; call the value with each outcome."""
    console = Console(stderr=True)
    with run_bar(console, "conversations", total, tally.before, transient=True) as update:
        tally.start()

        def show(outcome: "Outcome") -> None:
            tally.add(outcome)
            update(advance=1, description=f"{tally.speed:.0f} tokens/s")

        yield show
