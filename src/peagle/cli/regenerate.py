"""`peagle regenerate`: a target's own answers to the prompts of a data set.

Examples:
  peagle regenerate ./target chats.jsonl --output answers.jsonl
  peagle regenerate ./target --self-prompted 5000 --output answers.jsonl
  peagle regenerate ./target hf:owner/name:train --limit 1000 --output answers.jsonl
  peagle regenerate chats.jsonl --endpoint URL --model NAME --output answers.jsonl
"""

import asyncio
import functools
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from peagle.cli.groups import Flags, fields, from_flags
from peagle.cli.interrupts import at_once
from peagle.cli.loading import choose_speculation, open_async_llm
from peagle.cli.options import Hardware, NamedDrafter, TargetFlag, Threads, use_threads
from peagle.cli.progress import progress_bar
from peagle.config import ChatConfig, EngineConfig, SamplingParams
from peagle.configuration import PositiveInt, parse_json_option
from peagle.errors import InputError
from peagle.files import output_lock

if TYPE_CHECKING:
    from peagle.async_llm import AsyncLLM
    from peagle.regenerate.answers import Answerer
    from peagle.regenerate.run import Extent

    Run = Callable[[Answerer, int], Coroutine[None, None, None]]
    """Takes what answers, and how many conversations are in flight."""

ENDPOINT_CONCURRENCY = 32
SURVEYED, CUT_SHARE = 256, 0.05
"""Conversations after which cut answers are told, and from which share of them on."""
SAMPLED = fields(SamplingParams, "max_tokens temperature seed", max_tokens=2048, seed=0)
Sampling = Annotated[dict[str, Any], SAMPLED]
Length = Annotated[dict[str, Any], fields(EngineConfig, "max_model_len")]


class Answering(Flags):
    """What is answered, by whom, and where the answers go."""

    output: Path
    """JSONL file; an existing one gets the answers it lacks."""
    chat_template_kwargs: str = "{}"
    """JSON object of the chat template's variables."""
    concurrency: PositiveInt | None = None
    """Conversations in flight. Default: as many as memory allows; 32 at an endpoint"""
    self_prompted: PositiveInt | None = None
    """Answer so many questions that the target writes itself."""
    keep_cut: bool = False
    """Keep first answers that a limit cuts, as token ids, where an endpoint gives these."""
    limit: int | None = None
    """Use only this many conversations, the first ones. Default: all of them"""
    endpoint: str | None = None
    """OpenAI-compatible URL to ask instead of a target; key from OPENAI_API_KEY."""
    model: str | None = None
    """Model name at the endpoint."""

    def model_post_init(self, _: Any) -> None:
        if (self.endpoint is None) != (self.model is None):
            raise InputError("--endpoint and --model go together")

    @functools.cached_property
    def variables(self) -> Any:
        """The chat template's variables."""
        given, example = self.chat_template_kwargs, '{"enable_thinking": false}'
        return parse_json_option("--chat-template-kwargs", given, example)


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
    work: Answering,
    drafting: NamedDrafter,
    sampling: Sampling,
    length: Length,
    hardware: Hardware,
    threads: Threads = None,
) -> None:
    """Write the target's own answer to every question.

    The answers in the data are ignored. The same command continues a stopped run, also with edited
    data.
    """
    from peagle.regenerate.output import Output
    from peagle.regenerate.run import read_conversations
    from peagle.regenerate.run import regenerate as answer

    variables = work.variables
    with from_flags(default_chat_template_kwargs="--chat-template-kwargs"):
        params = SamplingParams(**sampling)
        config = EngineConfig(**length, **hardware, max_num_seqs=work.concurrency)
        ChatConfig(default_chat_template_kwargs=variables)
    if work.endpoint is not None and (target_flag is not None or drafting != NamedDrafter()):
        raise InputError("--endpoint has its own models; leave out --target and --drafter")
    words = [word for word in (target, *(sources or [])) if word is not None]
    place, given = _target_and_sources(words, target_flag, work)
    speculation = choose_speculation(place, drafting) if place else None
    if work.self_prompted is None:
        conversations = read_conversations(given, work.limit, variables)
    use_threads(threads)
    by = _answered_by(work.model or str(Path(place)), params, work)
    with ExitStack() as opened:
        if os.access(work.output.parent, os.W_OK):
            opened.enter_context(output_lock(work.output))
        file = Output(work.output, by, work.endpoint is None, variables)

        @functools.cache
        def engine() -> "AsyncLLM":
            return opened.enter_context(closing(open_async_llm(place, speculation, config)))

        if work.self_prompted is not None:
            path = _write_questions(work, work.self_prompted, place, engine, params.seed or 0)
            most = work.limit or work.self_prompted
            conversations = read_conversations([str(path)], most, variables)
        waiting = {asked: one for asked, one in conversations.items() if asked not in file.done}
        tally = Tally(len(conversations) - len(waiting), len(file.done - conversations.keys()))

        async def run(answerer: "Answerer", in_flight: int) -> None:
            with _progress(tally, len(conversations)) as show:
                await answer(waiting, answerer, params, file, in_flight, show, work.keep_cut)

        try:
            if work.endpoint is not None:
                _ask_endpoint(run, work)
            elif waiting:
                _ask_engine(run, engine(), config)
        except KeyboardInterrupt:
            told = f"{work.output} has {tally.before + tally.finished} of {len(conversations)}"
            typer.echo(f"{told}; the same command continues", err=True)
            raise
    if tally.skipped and not tally.before and not tally.finished:
        raise InputError(f"no conversation was answered: {tally.problem}")
    typer.echo(tally)


@dataclass
class Tally:
    """What a run has done so far, and how fast."""

    before: int
    others: int
    """Conversations that an earlier run finished, and those in the file but not in the data."""
    finished: int = 0
    tokens: int = 0
    shortened: int = 0
    skipped: int = 0
    cut: int = 0
    problem: str | None = None
    """Why the first conversation that ends early does so."""
    surveyed: list[bool] = field(default_factory=list)
    """Whether a limit cuts answers, of those that began first: of all that have ended, those that
    ended early would be the short ones."""
    _start: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """Measure speed from now on."""
        self._start = time.perf_counter()

    def add(self, place: int, outcome: "Extent") -> str | None:
        """Count a conversation by its place in the run; a warning, once, if many are cut."""
        self.finished += outcome.record is not None
        self.tokens += outcome.tokens
        self.shortened += outcome.record is not None and outcome.problem is not None
        self.skipped += outcome.record is None
        self.cut += outcome.cut
        self.problem = self.problem or outcome.problem
        if place >= SURVEYED:
            return None
        self.surveyed.append(outcome.cut)
        cut = sum(self.surveyed)
        if len(self.surveyed) < SURVEYED or cut < CUT_SHARE * SURVEYED:
            return None
        return (
            f"--max-tokens or the context's end cut an answer of {cut} of the first {SURVEYED} "
            "conversations, which are left out or end there: stop, and start again with a larger "
            "--max-tokens, to keep them"
        )

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


def _target_and_sources(
    words: Sequence[str], target: str | None, work: Answering
) -> tuple[str, Sequence[str]]:
    """The target, empty with an endpoint, and the sources: all words but an unflagged target."""
    if work.endpoint is None and target is None:
        if not words:
            raise InputError("no target: give TARGET or --target, then the conversations' files")
        target, *words = words
    if work.self_prompted and (words or work.endpoint):
        raise InputError("--self-prompted writes its own questions, here; leave out files of them")
    if not words and not work.self_prompted:
        named = f"{target} is the target; " if target else ""
        raise InputError(f"{named}name the conversations' files")
    return target or "", words


def _answered_by(name: str, params: SamplingParams, work: Answering) -> str:
    """What distinguishes a run's answers; a finished answer is the same for any --max-tokens."""
    sampled = f"temperature {params.temperature}, seed {params.seed}"
    cut = f", cut at {params.max_tokens} tokens" if work.keep_cut else ""
    return f"{name}, {sampled if params.temperature else 'greedy'}{cut}{_shown(work.variables)}"


def _shown(variables: Mapping[str, Any]) -> str:
    return f", {json.dumps(variables, sort_keys=True)}" if variables else ""


def _ask_engine(run: "Run", llm: "AsyncLLM", config: EngineConfig) -> None:
    """Have as many in flight as asked, or a few more than the engine runs."""
    from peagle.regenerate.engine import EngineAnswerer

    seqs = llm.llm.engine.max_num_seqs
    in_flight = config.max_num_seqs or seqs + -(-seqs // 8)  # so that the engine is never idle
    asyncio.run(run(EngineAnswerer(llm), in_flight))


def _write_questions(
    work: Answering, wanted: int, target: str, engine: "Callable[[], AsyncLLM]", seed: int
) -> Path:
    """A file of questions; the target writes as many as it lacks of those wanted."""
    from peagle.regenerate.questions import Questioner, QuestionFile, write_questions

    path = work.output.with_suffix(".questions.jsonl")
    file = QuestionFile(path, f"{Path(target)}, seed {seed}{_shown(work.variables)}")
    if file.count < wanted:
        llm, console = engine(), Console(stderr=True)
        ask = Questioner(llm, seed, work.variables).ask
        with progress_bar(console, "questions", wanted, file.count, transient=True) as update:
            told = functools.partial(update, advance=1, description="")
            asyncio.run(write_questions(ask, file, wanted, llm.llm.engine.max_num_seqs, told))
    return path


def _ask_endpoint(run: "Run", work: Answering) -> None:
    with at_once():
        from peagle.regenerate.endpoint import open_endpoint

    async def ask() -> None:
        url, model = str(work.endpoint), str(work.model)
        connections = work.concurrency or ENDPOINT_CONCURRENCY
        async with open_endpoint(url, model, connections) as answerer:
            await run(answerer, connections)

    asyncio.run(ask())


@contextmanager
def _progress(tally: Tally, total: int) -> "Iterator[Callable[[int, Extent], None]]":
    """A bar on stderr; call the value with each outcome and its place in the run."""
    console = Console(stderr=True)
    with progress_bar(console, "conversations", total, tally.before, transient=True) as update:
        tally.start()

        def show(place: int, outcome: "Extent") -> None:
            if warning := tally.add(place, outcome):
                console.print(warning, highlight=False)
            update(advance=1, description=f"{tally.speed:.0f} tokens/s")

        yield show
