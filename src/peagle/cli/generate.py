"""`peagle generate`: prompts in, texts out.

Examples:
  peagle generate --prompt "def fibonacci(n):" --max-tokens 64
  peagle generate ./target --drafter ./drafter --k 5 --chat --prompt "Hello"
  peagle generate --prompts questions.txt --temperature 0.8 --seed 1 --json
  echo "import os" | peagle generate --prompt -
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from peagle.cli.groups import Flags, fields, from_flags
from peagle.cli.loading import as_chats, choose_speculation, load_llm
from peagle.cli.options import Hardware, NamedDrafter, Target, Threads, use_threads
from peagle.config import EngineConfig, SamplingParams
from peagle.configuration import parse_json_option
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.prompts import Prompt
    from peagle.completion import Chunk, Completion
    from peagle.live_request import ChatTurn
    from peagle.llm import LLM

STDIN = "-"
HEADING = 60
"""Most characters of a prompt above its text, where there are several."""
SAMPLED = (
    "max_tokens min_tokens temperature top_k top_p min_p repetition_penalty presence_penalty "
    "frequency_penalty seed ignore_eos"
)
Sampling = Annotated[dict[str, Any], fields(SamplingParams, SAMPLED)]


class Asked(Flags):
    """Prompts, where their answers end, and how they are shown."""

    prompt: list[str] = []
    """A prompt, or - to read one from stdin; repeatable."""
    prompts: str | None = None
    """File of prompts: .jsonl, .jsonl.gz or .txt (one per line)."""
    chat: bool = False
    """Render each prompt as a user's turn."""
    stop: list[str] = []
    """Text to end before; repeatable."""
    stop_token_id: list[int] = []
    """Token id to end at; repeatable."""
    logit_bias: str = "{}"
    """Token id -> value added to its logit: {"42": -5}."""
    as_json: bool = Field(False, alias="json")
    """One JSON object per prompt: tokens and accepted counts."""
    logprobs: int | None = None
    """With --json: top log-probabilities per token."""


def generate(
    *,
    target: Target,
    asked: Asked,
    drafting: NamedDrafter,
    sampling: Sampling,
    hardware: Hardware,
    threads: Threads = None,
) -> None:
    """Complete prompts with a drafter's help.

    By default with the bundled pair. The text goes to stdout; what a model thinks before it, and a
    line about the speed, to stderr.
    """
    with from_flags(stop_token_ids="--stop-token-id"):
        params = SamplingParams(
            **sampling,
            logprobs=asked.logprobs,
            stop=tuple(asked.stop),
            stop_token_ids=tuple(asked.stop_token_id),
            logit_bias=parse_json_option("--logit-bias", asked.logit_bias, '{"42": -100}'),
        )
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    if params.temperature == 0 and filtered:
        raise InputError(
            "temperature 0 is greedy, so --top-k, --top-p and --min-p would have no effect; give "
            "--temperature as well"
        )
    if params.logprobs is not None and not asked.as_json:
        raise InputError("--logprobs needs --json, which prints them")
    if asked.as_json and target is not None and target.endswith((".json", ".jsonl")):
        raise InputError(f"--json takes no file here: leave out {target} and redirect stdout to it")
    from peagle.completion import check_finished

    given = _read_prompts(asked, target)
    speculation = choose_speculation(target, drafting)
    use_threads(threads)
    if asked.chat:
        given = as_chats(given, target)
    llm = load_llm(target, speculation, EngineConfig(**hardware))
    write = _write_json if asked.as_json else _write_text
    check_finished(write(llm, given, params))


def _read_prompts(asked: Asked, target: str | None) -> "list[Prompt]":
    from peagle.bench.prompts import Prompt, load_prompts

    if not asked.prompt and asked.prompts is None:
        taken = f"; {target} is the target" if target else ""
        raise InputError(f"no prompt: give --prompt TEXT, --prompt - or --prompts FILE{taken}")
    prompts = [Prompt(_read_stdin() if text == STDIN else text) for text in asked.prompt]
    return prompts + (load_prompts(asked.prompts) if asked.prompts is not None else [])


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode() if sys.stdin else ""  # it may be closed
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not valid UTF-8 at byte {error.start}") from None


def _encode(llm: "LLM", prompts: "Sequence[Prompt]") -> list[list[int]]:
    """Token ids of all prompts. Raises `InputError` for the first that is too long."""
    encoded = [prompt.token_ids(llm.tokenizer) for prompt in prompts]
    held = llm.engine.max_length
    for prompt, tokens in zip(prompts, encoded, strict=True):
        if len(tokens) >= held:
            raise InputError(
                f"{prompt.place} has {len(tokens)} tokens, but the context holds {held} with "
                "at least one of output; shorten it"
            )
    return encoded


def _write_json(
    llm: "LLM", prompts: "Sequence[Prompt]", params: SamplingParams
) -> "Sequence[Completion]":
    """Print each prompt's line once it is finished, so that an interruption keeps it."""
    encoded, turn = _encode(llm, prompts), _turn(llm, prompts)
    completions: list[Completion] = []
    for prompt, completion in zip(prompts, llm.completions(encoded, params, turn), strict=True):
        typer.echo(json.dumps(_record(prompt, completion)))
        completions.append(completion)
    return completions


def _record(prompt: "Prompt", completion: "Completion") -> dict[str, Any]:
    did = completion.speculation
    record = {
        "prompt": prompt.text,
        "prompt_token_ids": completion.prompt_token_ids,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "cycles": did.cycles,
        "pauses": did.pauses,
        "drafted": did.drafted,
        "accepted_per_cycle": did.accepted_per_cycle,
        "accepted_per_position": did.accepted_per_position,
    }
    if completion.message.reasoning:
        record["reasoning_content"] = completion.message.reasoning
    if completion.failure is not None:
        record["error"] = completion.failure
    if completion.logprobs:
        record["logprobs"] = [
            {"logprob": token.chosen, "top": token.top} for token in completion.logprobs
        ]
    return record


def _write_text(
    llm: "LLM", prompts: "Sequence[Prompt]", params: SamplingParams
) -> "Sequence[Completion]":
    """Print each text once it is finished, a single one as it is written; then the speed."""
    start = time.perf_counter()
    encoded, turn = _encode(llm, prompts), _turn(llm, prompts)
    completions: list[Completion] = []
    if len(encoded) == 1:
        completions = [_stream(llm, encoded[0], params, turn)]
    else:
        for prompt, completion in zip(prompts, llm.completions(encoded, params, turn), strict=True):
            begin = shorten(prompt.text, HEADING, placeholder=" ...")
            heading = f"--- {len(completions) + 1} of {len(prompts)}: {begin}"
            typer.secho("\n" * bool(completions) + heading, dim=True)
            _echo_thoughts(completion.message.reasoning, nl=True)
            typer.echo(completion.text)
            completions.append(completion)
    typer.secho(_speed(completions, time.perf_counter() - start), err=True, dim=True)
    return completions


def _turn(llm: "LLM", prompts: "Sequence[Prompt]") -> "ChatTurn | None":
    """Whether the answers are those of conversations, in which thoughts are told from content."""
    from peagle.live_request import ChatTurn

    return ChatTurn() if all(prompt.is_chat(llm.tokenizer) for prompt in prompts) else None


def _echo_thoughts(text: str, nl: bool = False) -> None:
    """Show thoughts, but not on stdout, which is the answer's."""
    if text:
        typer.secho(text, err=True, dim=True, italic=True, nl=nl)


def _stream(
    llm: "LLM", prompt: list[int], params: SamplingParams, turn: "ChatTurn | None"
) -> "Completion":
    try:
        return _show(llm.stream(prompt, params, turn))
    except KeyboardInterrupt:
        typer.echo()  # what is said of it comes below the text
        raise


def _show(chunks: "Iterator[Chunk]") -> "Completion":
    """Show a text as it comes."""
    from peagle.dialects.events import Reasoning

    thinking = False
    for chunk in chunks:
        thoughts = "".join(event.text for event in chunk.events if isinstance(event, Reasoning))
        _echo_thoughts(thoughts)
        thinking = thinking or bool(thoughts)
        if thinking and chunk.text:
            typer.echo("\n", err=True)
            thinking = False
        typer.echo(chunk.text, nl=chunk.completion is not None)
        if chunk.completion is not None:
            return chunk.completion
    raise AssertionError("a stream ends with its completion")


def _speed(completions: "Sequence[Completion]", seconds: float) -> str:
    from peagle.speculation import DraftTotals

    tokens = sum(len(completion.token_ids) for completion in completions)
    speed = f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
    did = DraftTotals.pooled([completion.speculation for completion in completions])
    if not did.cycles:
        return speed
    length = f"{speed}, acceptance length {did.acceptance_length:.2f} over {did.cycles} cycles"
    if not did.pauses:
        return length
    emitted = f"{did.tokens_per_cycle:.2f} tokens a cycle with {did.pauses} that drafted none"
    return f"{length}, {emitted}"
