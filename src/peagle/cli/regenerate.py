"""`peagle regenerate`: a target's own answers to the prompts of a data set."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from peagle.cli.interrupts import at_once
from peagle.cli.loading import open_async_llm, read_speculation
from peagle.cli.options import Device, DTypeName, Threads, from_flags, use_threads
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


def regenerate(
    target: Annotated[
        str, typer.Argument(help="Target model: directory or hub id; leave out with --endpoint.")
    ],
    output: Annotated[
        Path,
        typer.Option(help="JSONL file; an existing one gets the answers it lacks."),
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Conversations: JSONL files, or hf:ID_OR_PATH[:SPLIT] for datasets."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 2048,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same answers.")] = 0,
    concurrency: Annotated[int, typer.Option(help="Conversations in flight.")] = 32,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Use only this many conversations, the first ones.", show_default="all of them"
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(help="vLLM's JSON: the drafter and its K.", show_default="none"),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of prompt and output together.", show_default="the target's"
        ),
    ] = None,
    dtype: DTypeName = "auto",
    device: Device = "auto",
    threads: Threads = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help=f"OpenAI-compatible URL to ask instead of TARGET; key from {KEY}."),
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
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        config = EngineConfig(
            dtype=dtype, device=device, max_model_len=max_model_len, max_num_seqs=concurrency
        )
    speculation = read_speculation(speculative_config) if speculative_config else None
    given = _sources(target, sources or [], endpoint, model)
    conversations = read_conversations(given, limit)
    use_threads(threads)
    with open_output(output, _answered_by(model or str(Path(target)), params)) as file:
        waiting = {asked: one for asked, one in conversations.items() if asked not in file.done}
        tally = Tally(len(conversations) - len(waiting), len(file.done - conversations.keys()))

        async def run(answerer: "Answerer") -> None:
            with _progress(tally, len(conversations)) as show:
                await answer(waiting, answerer, params, file, concurrency, show)

        if endpoint is not None and model is not None:
            _ask_endpoint(run, endpoint, model, concurrency)
        elif waiting:
            _ask_engine(run, waiting.values(), target, speculation, config)
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


def _sources(
    target: str, others: Sequence[str], endpoint: str | None, model: str | None
) -> Sequence[str]:
    """The sources among the arguments; without an endpoint the first is the target."""
    if (endpoint is None) != (model is None):
        raise InputError("--endpoint and --model go together")
    if endpoint is not None:
        return [target, *others]
    if not others:
        raise InputError(f"{target} is the target; name the conversations' files after it")
    return others


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
