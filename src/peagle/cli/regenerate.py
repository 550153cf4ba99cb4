"""`peagle regenerate`: a target's own answers to the prompts of a data set."""

import asyncio
import functools
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
    DraftingFlags,
    Hardware,
    NamedDrafter,
    TargetFlag,
    Threads,
    from_flags,
    use_threads,
)
from peagle.cli.progress import run_bar
from peagle.config import (
    ChatConfig,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
    parse_json_option,
)
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.async_llm import AsyncLLM
    from peagle.regenerate.answers import Answerer
    from peagle.regenerate.run import Conversation, Extent

    Run = Callable[[Answerer, int], Coroutine[None, None, None]]
    """Takes what answers, and how many conversations are in flight."""

EXAMPLE = """\b
Examples:
  peagle regenerate ./target chats.jsonl --output answers.jsonl
  peagle regenerate ./target --self-prompted 5000 --output answers.jsonl
  peagle regenerate ./target hf:owner/name:train --limit 1000 --output answers.jsonl
  peagle regenerate chats.jsonl --endpoint URL --model NAME --output answers.jsonl"""
KEY = "OPENAI_API_KEY"
ENDPOINT_CONCURRENCY = 32
SURVEYED, CUT_SHARE = 256, 0.05
"""Conversations after which cut answers are told, and from which share of them on."""
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
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="JSON object of the chat template's variables.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Conversations in flight.",
            show_default="as many as memory allows; 32 at an endpoint",
        ),
    ] = None,
    self_prompted: Annotated[
        int | None,
        typer.Option(help="Answer so many questions that the target writes itself.", min=1),
    ] = None,
    keep_cut: Annotated[
        bool,
        typer.Option("--keep-cut", help="Keep first answers that a limit cuts, as token ids."),
    ] = False,
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

    named = {"default_chat_template_kwargs": "--chat-template-kwargs"}
    with from_flags(max_num_seqs="--concurrency", **named):
        params = SamplingParams(**sampling)
        config = EngineConfig(**length, **hardware, max_num_seqs=concurrency)
        chat = ChatConfig(default_chat_template_kwargs=_variables(chat_template_kwargs))
    _check_endpoint(endpoint, model, target_flag, drafting, keep_cut)
    words = [word for word in (target, *(sources or [])) if word is not None]
    place, given = _target_and_sources(words, target_flag, endpoint, self_prompted is not None)
    speculation = choose_speculation(place, drafting) if place else None
    if self_prompted is None:
        conversations = read_conversations(given, limit)
    use_threads(threads)
    variables = chat.default_chat_template_kwargs
    by = _answered_by(model or str(Path(place)), params, variables, keep_cut)
    with (
        _engine_of(place, speculation, config) as engine,
        open_output(output, by, with_ids=endpoint is None) as file,
    ):
        if self_prompted is not None:
            questions = output.with_suffix(".questions.jsonl")
            _write_questions(questions, place, self_prompted, engine, params.seed or 0, variables)
            conversations = read_conversations([str(questions)], limit or self_prompted)
        waiting = {asked: one for asked, one in conversations.items() if asked not in file.done}
        tally = Tally(len(conversations) - len(waiting), len(file.done - conversations.keys()))

        async def run(answerer: "Answerer", in_flight: int) -> None:
            with _progress(tally, len(conversations)) as show:
                await answer(waiting, answerer, params, file, in_flight, show, keep_cut)

        try:
            if endpoint is not None and model is not None:
                _ask_endpoint(run, endpoint, model, concurrency or ENDPOINT_CONCURRENCY, variables)
            elif waiting:
                _ask_engine(run, waiting.values(), engine(), config, variables)
        except KeyboardInterrupt:
            kept = tally.before + tally.finished
            typer.echo(
                f"{output} has {kept} of {len(conversations)}; the same command continues", err=True
            )
            raise
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

    def add(self, outcome: "Extent") -> None:
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


class Survey:
    """Whether a limit cuts many answers, told once by those that began first.

    Of all that have ended, those that ended early would be the short ones.
    """

    def __init__(self) -> None:
        self._ended = self._cut = 0

    def add(self, place: int, cut: bool) -> str | None:
        """Count a conversation by its place in the run; a warning where it is the last to count."""
        if place >= SURVEYED:
            return None
        self._ended += 1
        self._cut += cut
        if self._ended < SURVEYED or self._cut < CUT_SHARE * SURVEYED:
            return None
        return (
            f"--max-tokens or the context's end cut an answer of {self._cut} of the first "
            f"{SURVEYED} conversations, which are left out or end there: stop, and start again "
            "with a larger --max-tokens, to keep them"
        )


def _check_endpoint(
    endpoint: str | None,
    model: str | None,
    target: str | None,
    drafting: NamedDrafter,
    keep_cut: bool,
) -> None:
    if (endpoint is None) != (model is None):
        raise InputError("--endpoint and --model go together")
    if endpoint is not None and (target is not None or drafting != NamedDrafter()):
        raise InputError("--endpoint has its own models; leave out --target and --drafter")
    if endpoint is not None and keep_cut:
        raise InputError("an endpoint gives no token ids to keep; leave out --keep-cut")


def _target_and_sources(
    words: Sequence[str], target: str | None, endpoint: str | None, self_prompted: bool
) -> tuple[str, Sequence[str]]:
    """The target, empty with an endpoint, and the sources: all words but an unflagged target."""
    if endpoint is None and target is None:
        if not words:
            raise InputError("no target: give TARGET or --target, then the conversations' files")
        target, *words = words
    if self_prompted and (words or endpoint):
        raise InputError("--self-prompted writes its own questions, here; leave out files of them")
    if not words and not self_prompted:
        named = f"{target} is the target; " if target else ""
        raise InputError(f"{named}name the conversations' files")
    return target or "", words


def _answered_by(
    name: str, params: SamplingParams, variables: Mapping[str, Any], keep_cut: bool
) -> str:
    """What distinguishes a run's answers; a finished answer is the same for any --max-tokens."""
    sampled = f"temperature {params.temperature}, seed {params.seed}"
    cut = f", cut at {params.max_tokens} tokens" if keep_cut else ""
    return f"{name}, {sampled if params.temperature else 'greedy'}{cut}{_shown(variables)}"


def _shown(variables: Mapping[str, Any]) -> str:
    return f", {json.dumps(variables, sort_keys=True)}" if variables else ""


def _variables(text: str | None) -> Any:
    """The chat template's variables."""
    return parse_json_option("--chat-template-kwargs", text or "{}", '{"enable_thinking": false}')


def _ask_engine(
    run: "Run",
    conversations: "Iterable[Conversation]",
    llm: "AsyncLLM",
    config: EngineConfig,
    variables: Mapping[str, Any],
) -> None:
    from peagle.regenerate.engine import EngineAnswerer
    from peagle.regenerate.run import check_templates

    answerer = EngineAnswerer(llm, variables)
    check_templates(conversations, answerer.render)
    asyncio.run(run(answerer, _in_flight(llm, config)))


def _write_questions(
    path: Path,
    target: str,
    wanted: int,
    engine: "Callable[[], AsyncLLM]",
    seed: int,
    variables: Mapping[str, Any],
) -> None:
    """Have the target write questions, as many as a file lacks of those wanted."""
    from peagle.regenerate.questions import Questioner, QuestionFile, write_questions

    file = QuestionFile(path, f"{Path(target)}, seed {seed}{_shown(variables)}")
    if file.count >= wanted:
        return
    llm = engine()
    questioner = Questioner(llm, seed, variables)
    console = Console(stderr=True)
    with run_bar(console, "questions", wanted, file.count, transient=True) as update:
        told = functools.partial(update, advance=1, description="")
        asyncio.run(
            write_questions(questioner.ask, file, wanted, llm.llm.engine.max_num_seqs, told)
        )


@contextmanager
def _engine_of(
    target: str, speculation: SpeculativeConfig | None, config: EngineConfig
) -> "Iterator[Callable[[], AsyncLLM]]":
    """An engine that is loaded when it is first asked for."""
    with ExitStack() as opened:

        @functools.cache
        def engine() -> "AsyncLLM":
            llm = open_async_llm(target, speculation, config)
            opened.callback(llm.close)
            return llm

        yield engine


def _in_flight(llm: "AsyncLLM", config: EngineConfig) -> int:
    """Conversations at once: as asked, or a few more than the engine runs, so that none is idle."""
    seqs = llm.llm.engine.max_num_seqs
    return config.max_num_seqs or seqs + -(-seqs // 8)


def _ask_endpoint(
    run: "Run", url: str, model: str, connections: int, variables: Mapping[str, Any]
) -> None:
    with at_once():
        from peagle.regenerate.endpoint import open_endpoint

    async def ask() -> None:
        key = os.environ.get(KEY)
        async with open_endpoint(url, model, key, connections, variables) as answerer:
            await run(answerer, connections)

    asyncio.run(ask())


@contextmanager
def _progress(tally: Tally, total: int) -> "Iterator[Callable[[int, Extent], None]]":
    """A bar on stderr; call the value with each outcome and its place in the run."""
    console = Console(stderr=True)
    with run_bar(console, "conversations", total, tally.before, transient=True) as update:
        tally.start()
        survey = Survey()

        def show(place: int, outcome: "Extent") -> None:
            tally.add(outcome)
            if warning := survey.add(place, outcome.cut):
                console.print(warning, highlight=False)
            update(advance=1, description=f"{tally.speed:.0f} tokens/s")

        yield show
