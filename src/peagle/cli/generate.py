"""`peagle generate`: prompts in, texts out."""

import json
import sys
import time
from collections.abc import Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli.loading import choose_speculation, load_llm
from peagle.cli.options import Device, DTypeName, Target, Threads, from_flags, use_threads
from peagle.config import EngineConfig, SamplingParams, parse_json_option
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.prompts import Prompt
    from peagle.llm import LLM, Completion

EXAMPLE = """\b
Examples:
  peagle generate --prompt "def fibonacci(n):" --max-tokens 64
  peagle generate --target ./target --drafter ./drafter --k 5 --prompt "Hello"
  peagle generate --prompts questions.txt --temperature 0.8 --seed 1 --json
  echo "import os" | peagle generate --prompt -"""
STDIN = "-"
HEADING = 60
"""Most characters of a prompt above its text."""
DEFAULT = SamplingParams()


def generate(
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt, or - to read one from stdin; repeatable.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="File of prompts: .jsonl, .jsonl.gz or .txt (one per line).")
    ] = None,
    target: Target = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Drafter: directory or hub id.",
            show_default="the bundled one; none with your own target",
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", help="Tokens to draft per cycle.", show_default="as trained"),
    ] = None,
    speculative_config: Annotated[
        str | None, typer.Option(help="vLLM's JSON, in place of --drafter and --k.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most output tokens.")] = DEFAULT.max_tokens,
    min_tokens: Annotated[int, typer.Option(help="Fewest output tokens.")] = DEFAULT.min_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = DEFAULT.temperature,
    top_k: Annotated[
        int, typer.Option(help="Sample from the k likeliest; 0 is all.")
    ] = DEFAULT.top_k,
    top_p: Annotated[
        float, typer.Option(help="Sample from this share of probability; 1 is all.")
    ] = DEFAULT.top_p,
    min_p: Annotated[
        float, typer.Option(help="Drop below this share of the likeliest; 0 drops none.")
    ] = DEFAULT.min_p,
    repetition_penalty: Annotated[
        float, typer.Option(help="1 is no penalty.")
    ] = DEFAULT.repetition_penalty,
    presence_penalty: Annotated[
        float, typer.Option(help="0 is no penalty.")
    ] = DEFAULT.presence_penalty,
    frequency_penalty: Annotated[
        float, typer.Option(help="0 is no penalty.")
    ] = DEFAULT.frequency_penalty,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to end before; repeatable.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="Token id to end at; repeatable.")
    ] = None,
    logit_bias: Annotated[
        str | None, typer.Option(help='Token id -> value added to its logit: {"42": -5}.')
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Write on past the end of text.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: top log-probabilities per token.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per prompt: tokens and accepted counts.")
    ] = False,
    dtype: DTypeName = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Complete prompts with a drafter's help.

    By default with the bundled pair. The text goes to stdout, a line about the speed to stderr.
    """
    with from_flags(stop_token_ids="--stop-token-id"):
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(stop_token_id or ()),
            logit_bias=parse_json_option("--logit-bias", logit_bias or "{}", '{"42": -100}'),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
    if temperature == 0 and (top_k > 0 or top_p < 1 or min_p > 0):
        raise InputError(
            "temperature 0 is greedy, so --top-k, --top-p and --min-p would have no effect; give "
            "--temperature as well"
        )
    if logprobs is not None and not as_json:
        raise InputError("--logprobs needs --json, which prints them")
    from peagle.llm import check_finished

    given = _read_prompts(prompt or [], prompts)
    speculation = choose_speculation(target, speculative_config, drafter, k)
    use_threads(threads)
    llm = load_llm(target, speculation, EngineConfig(dtype=dtype, device=device))
    write = _write_json if as_json else _write_text
    check_finished(write(llm, given, params))


def _read_prompts(texts: Sequence[str], file: str | None) -> "list[Prompt]":
    from peagle.bench.prompts import Prompt, load_prompts

    if not texts and file is None:
        raise InputError("no prompt: give --prompt TEXT, --prompt - or --prompts FILE")
    prompts = [Prompt(_read_stdin() if text == STDIN else text) for text in texts]
    return prompts + (load_prompts(file) if file is not None else [])


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
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
    encoded = _encode(llm, prompts)
    completions: list[Completion] = []
    for prompt, completion in zip(prompts, llm.completions(encoded, params), strict=True):
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
        "drafted": did.drafted,
        "accepted_per_cycle": did.accepted_per_cycle,
        "accepted_per_position": did.accepted_per_position,
    }
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
    encoded = _encode(llm, prompts)
    completions: list[Completion] = []
    if len(encoded) == 1:
        completions = [_stream(llm, encoded[0], params)]
    else:
        named = sys.stdout.isatty()
        for prompt, completion in zip(prompts, llm.completions(encoded, params), strict=True):
            heading = _heading(prompt) if named else ""
            typer.echo("\n" * bool(completions) + heading + completion.text)
            completions.append(completion)
    typer.secho(_speed(completions, time.perf_counter() - start), err=True, dim=True)
    return completions


def _heading(prompt: "Prompt") -> str:
    """A line that says whose the text below it is."""
    return typer.style(f"--- {shorten(prompt.text, HEADING, placeholder=' ...')}", dim=True) + "\n"


def _stream(llm: "LLM", prompt: list[int], params: SamplingParams) -> "Completion":
    for chunk in llm.stream(prompt, params):
        typer.echo(chunk.text, nl=chunk.completion is not None)
        if chunk.completion is not None:
            return chunk.completion
    raise AssertionError("a stream ends with its completion")


def _speed(completions: "Sequence[Completion]", seconds: float) -> str:
    from peagle.bench.measures import measure

    found = measure(completions, seconds)
    speed = f"{found.output_tokens} tokens in {seconds:.2f} s, {found.otps:.1f} tokens/s"
    cycles = sum(completion.speculation.cycles for completion in completions)
    if not cycles:
        return speed
    return f"{speed}, acceptance length {found.acceptance_length:.2f} over {cycles} cycles"
