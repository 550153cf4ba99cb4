"""LLM: prompts in, texts out. Below it everything is token ids."""

import asyncio
import contextlib
import itertools
import operator
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.detokenizer import Detokenizer
from peagle.device import resolve_device, resolve_dtype
from peagle.drafters.checkpoint import load_drafter
from peagle.drafters.drafter import Drafter
from peagle.drafters.eagle3 import SequentialDrafter
from peagle.drafters.peagle import ParallelDrafter
from peagle.engine.engine import Engine
from peagle.engine.request import Request, RequestOutput, Speculation, TokenLogprobs
from peagle.errors import InputError
from peagle.models.families import load_decoder
from peagle.models.tokenizer import load_tokenizer
from peagle.models.weights import model_directory, read_json

Prompt = str | Sequence[int]
DEFAULT_K = {True: 7, False: 3}
"""K where neither the user nor the drafter's directory names one: P-EAGLE, EAGLE-3."""


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    """stop, length or abort."""
    speculation: Speculation
    logprobs: tuple[TokenLogprobs, ...]
    token_times: tuple[float, ...]
    """Seconds from the request's arrival to each output token."""


@dataclass(frozen=True)
class Chunk:
    """What one step added to one request."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    accepted: int
    """How many of `token_ids`, from the first on, are accepted drafts."""
    completion: Completion | None
    """The whole, once finished."""


@dataclass
class _Live:
    request: Request
    detokenizer: Detokenizer
    times: list[float] = field(default_factory=list)


class LLM:
    """A target, perhaps a drafter, and an engine over both.

    Raises `InputError` when a directory, the pair or the memory does not work.
    """

    def __init__(
        self,
        target: str | Path,
        speculative_config: SpeculativeConfig | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        config = config or EngineConfig()
        directory = model_directory(str(target))
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, device)
        decoder = load_decoder(directory, dtype, device, config.max_model_len)
        self.tokenizer: Any = load_tokenizer(directory)
        drafter, k = None, 0
        if speculative_config is not None:
            place = model_directory(speculative_config.model)
            model = load_drafter(place, decoder, speculative_config.parallel_drafting)
            parallel = model.config.parallel
            drafter = ParallelDrafter(model) if parallel else SequentialDrafter(model)
            k = speculative_config.num_speculative_tokens or default_k(drafter)
        self.drafter: Drafter | None = drafter
        self.k = k
        self.engine = Engine(decoder, drafter, k, config, end_tokens(directory))
        self._ids = itertools.count()
        self._live: dict[str, _Live] = {}
        self._kept: list[Chunk] = []
        """Chunks of requests that another caller waits for."""

    @property
    def beyond_training(self) -> str | None:
        """A warning when K is larger than the drafter was trained for, else None."""
        trained = self.drafter.model.config.trained_tokens if self.drafter else None
        if trained is None or self.k <= trained:
            return None
        return f"K = {self.k} is beyond the {trained} tokens the drafter was trained for"

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises `InputError` when it is empty or not valid text."""
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"the prompt is not valid UTF-8 text: {error}") from None
            ids: list[int] = self.tokenizer(prompt).input_ids
        else:
            try:
                ids = [operator.index(token) for token in prompt]
            except TypeError:
                raise InputError("a prompt is text or a list of token ids") from None
        if not ids:
            raise InputError("the prompt is empty; give at least one token")
        return ids

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt, in order. Raises `InputError` before any of them runs."""
        each = _per_prompt(params, len(prompts))
        encoded = [self.encode(prompt) for prompt in prompts]
        ids: list[str] = []
        try:
            for prompt, how in zip(encoded, each, strict=True):
                ids.append(self.submit(prompt, how))
            done: dict[str, Completion] = {}
            wanted = set(ids)
            while len(done) < len(ids):
                done |= {c.request_id: c.completion for c in self._step_for(wanted) if c.completion}
        except BaseException:
            for request_id in ids:
                self.cancel(request_id)
            raise
        return [done[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt, chunk by chunk; leaving the loop early cancels it."""
        request_id = self.submit(prompt, params or SamplingParams())
        finished = False
        try:
            while not finished:
                for chunk in self._step_for({request_id}):
                    finished = chunk.completion is not None
                    yield chunk
        finally:
            self.cancel(request_id)

    def submit(self, prompt: Prompt, params: SamplingParams) -> str:
        """Queue a prompt and return its request id; `step` runs it."""
        request_id = str(next(self._ids))
        request = self.engine.add(request_id, self.encode(prompt), params)
        self._live[request_id] = _Live(
            request, Detokenizer(self._decode, params.stop, params.min_tokens)
        )
        return request_id

    def step(self) -> list[Chunk]:
        """Run one engine step and return what each request got."""
        outputs = self.engine.step()
        now = time.perf_counter()
        kept, self._kept = self._kept, []
        return kept + [self._chunk(output, now) for output in outputs if output.new_tokens]

    def _step_for(self, ids: Set[str]) -> list[Chunk]:
        """What a step gave some requests; what it gave others is kept for whoever steps next."""
        chunks = self.step()
        self._kept = [chunk for chunk in chunks if chunk.request_id not in ids]
        return [chunk for chunk in chunks if chunk.request_id in ids]

    def cancel(self, request_id: str) -> None:
        """Drop a request; finished and unknown ids are ignored."""
        self._live.pop(request_id, None)
        self._kept = [chunk for chunk in self._kept if chunk.request_id != request_id]
        self.engine.abort(request_id)

    def _chunk(self, output: RequestOutput, now: float) -> Chunk:
        live = self._live[output.request_id]
        tokens, reason = list(output.new_tokens), output.finish_reason
        text = live.detokenizer
        stopped = text.extend(tokens[:-1] if reason == "stop" else tokens)
        if stopped is not None:
            tokens, reason = tokens[:stopped], "stop"
            self.engine.abort(output.request_id, reason)
        live.times += [now - live.request.arrived] * len(tokens)
        completion = self._complete(live, len(output.new_tokens) - len(tokens), reason)
        return Chunk(
            output.request_id,
            text.delta(finished=reason is not None),
            tuple(tokens),
            min(output.accepted, len(tokens)),
            completion,
        )

    def _complete(self, live: _Live, surplus: int, reason: str | None) -> Completion | None:
        """The finished request, less `surplus` tokens behind a stop string; None while running."""
        if reason is None:
            return None
        request = live.request
        if reason == "length":
            live.detokenizer.flush()
        del self._live[request.id]
        kept = request.output_length - surplus
        return Completion(
            request_id=request.id,
            prompt_token_ids=tuple(request.tokens[: request.prompt_length]),
            token_ids=tuple(request.output[:kept]),
            text=live.detokenizer.text,
            finish_reason=reason,
            speculation=request.speculation,
            logprobs=tuple(request.logprobs[:kept]),
            token_times=tuple(live.times),
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class EngineClosedError(Exception):
    """The engine was closed before the stream came to its end."""


class AsyncLLM:
    """The same engine on a thread of its own, for any number of concurrent streams."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Chunk]:
        """Complete one prompt, chunk by chunk; leaving the loop, or cancellation, ends it.

        Raises `InputError` when prompt or parameters cannot be used, and `EngineClosedError`
        once `close` was called.
        """
        command = _Command(prompt, params or SamplingParams(), asyncio.get_running_loop())
        with self._closing:
            if self._closed:
                raise EngineClosedError
            self._commands.put(command)
        try:
            while True:
                item = await command.chunks.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.completion is not None:
                    return
        finally:
            command.cancelled = True
            self._commands.put(command)

    def close(self) -> None:
        """Stop the engine's thread; streams still open end with `EngineClosedError`."""
        with self._closing:
            self._closed = True
            self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        commands: dict[str, _Command] = {}
        while True:
            if not self._obey(commands):
                self._fail(commands, EngineClosedError())
                return
            try:
                for chunk in self._llm.step():
                    commands[chunk.request_id].deliver(chunk)
                    if chunk.completion is not None:
                        del commands[chunk.request_id]
            except Exception as error:
                self._fail(commands, error)

    def _obey(self, commands: dict[str, "_Command"]) -> bool:
        """Take what was asked since the last step; sleep while idle. False: time to stop."""
        while not self._commands.empty() or not commands:
            command = self._commands.get()
            if command is None:
                return False
            if command.cancelled:
                self._llm.cancel(command.request_id)
                commands.pop(command.request_id, None)
                continue
            try:
                command.request_id = self._llm.submit(command.prompt, command.params)
            except Exception as error:
                command.deliver(error)
                continue
            commands[command.request_id] = command
        return True

    def _fail(self, commands: dict[str, "_Command"], error: Exception) -> None:
        for request_id, command in commands.items():
            self._llm.cancel(request_id)
            command.deliver(error)
        commands.clear()


class _Command:
    """A stream's request to the engine thread, and the way back."""

    def __init__(
        self, prompt: Prompt, params: SamplingParams, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.prompt, self.params = prompt, params
        self.request_id = ""
        self.cancelled = False
        self.chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self._loop = loop

    def deliver(self, item: Chunk | Exception) -> None:
        """Hand an item to the waiting stream, whose event loop may be gone by now."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.chunks.put_nowait, item)


def default_k(drafter: Drafter) -> int:
    """The K a drafter was trained for, else its method's usual one."""
    config = drafter.model.config
    return config.trained_tokens or DEFAULT_K[config.parallel]


def end_tokens(directory: Path) -> tuple[int, ...]:
    """The target's end-of-text ids, from its generation config, else its config."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            ids = read_json(directory / name).get("eos_token_id")
            if isinstance(ids, int):
                return (ids,)
            if isinstance(ids, list):
                return tuple(int(i) for i in ids)
    return ()


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InputError(f"{len(params)} sampling parameters for {count} prompts")
    return params
