"""LLM: prompts in, texts out. Below it everything is token ids."""

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Self

from peagle.completion import Chunk, Completion
from peagle.config import ChatConfig, EngineConfig, SamplingParams, StructuredOutputs
from peagle.detokenizer import detokenizers
from peagle.dialects.detection import find_dialect
from peagle.dialects.dialect import Dialect, needs_grammar
from peagle.dialects.markers import Markers
from peagle.dialects.parser import PlainText
from peagle.dialects.reader import Reader
from peagle.dialects.tools import Tool, ToolUse
from peagle.encoder import Prompt, PromptEncoder
from peagle.engine.engine import Engine
from peagle.engine.request import RequestOutput
from peagle.engine_client.client import EngineClient, EngineStepError
from peagle.engine_client.form import Form
from peagle.engine_client.local import LocalEngine
from peagle.engine_client.process import EngineProcess
from peagle.engine_client.replicas import Replicas
from peagle.engine_client.source import EngineSource
from peagle.errors import InputError
from peagle.grammar import lark_rule, refuse_added_tokens, try_form, written
from peagle.live_request import ChatTurn, LiveRequest, Prepared
from peagle.models.generation_config import sampling_defaults
from peagle.models.tokenizer import load_tokenizer
from peagle.models.weights import model_directory
from peagle.sandbox import in_sandbox
from peagle.schema import kept_form
from peagle.speculation import DraftTotals
from peagle.speculative_config import SpeculativeConfig
from peagle.stop_strings import StopStrings
from peagle.structural_tag import lark_of
from peagle.token_rules import ThoughtSpan, endings_of

Sampled = SamplingParams | Sequence[SamplingParams] | None
"""How some prompts are sampled: all alike, or each in its own way; None: by the defaults."""


class LLM(PromptEncoder):
    """A target, perhaps a drafter, and an engine over both.

    own_process: whether the engine runs in a process of its own, for `AsyncLLM`, which needs the
    interpreter for text meanwhile; what compiles grammars then waits for another thread's `step`.
    replicas: engines among which requests are divided; several have a process each, in any case.
    fronts: forks of this process that will have its engine (`EngineProcess.front`); 0: none.
    Raises `InputError` when a directory is unusable, the pair does not fit or memory runs out.
    """

    def __init__(
        self,
        target: str | Path,
        speculative_config: SpeculativeConfig | None = None,
        config: EngineConfig | None = None,
        chat: ChatConfig | None = None,
        own_process: bool = False,
        replicas: int = 1,
        fronts: int = 0,
    ) -> None:
        directory = model_directory(str(target))
        defaults = sampling_defaults(directory)
        tokenizer = load_tokenizer(directory)
        dialect = find_dialect(tokenizer, chat or ChatConfig())  # refuses a wrong name early
        source = EngineSource(
            target=str(directory), speculation=speculative_config, config=config or EngineConfig()
        )
        engine: EngineClient
        if replicas > 1:
            engine = Replicas(source, replicas)
        else:
            apart = own_process or fronts
            engine = EngineProcess(source, fronts=fronts) if apart else source.load(tokenizer)
        self._open(engine, tokenizer, defaults, chat or ChatConfig())
        self.dialect = dialect

    @classmethod
    def over(cls, engine: Engine, tokenizer: Any, chat: ChatConfig | None = None) -> Self:
        """An LLM over an existing engine."""
        llm = cls.__new__(cls)
        llm._open(LocalEngine(engine, tokenizer), tokenizer, {}, chat or ChatConfig())
        return llm

    def _open(
        self, engine: EngineClient, tokenizer: Any, defaults: dict[str, float], chat: ChatConfig
    ) -> None:
        super().__init__(tokenizer, engine.max_length, chat)
        self.engine, self.k = engine, engine.k
        self.sampling_defaults = defaults
        """Sampling parameters that the model's generation config suggests."""
        self._detokenizers = functools.cache(functools.partial(detokenizers, tokenizer))
        self.draft_totals = [DraftTotals([0] * engine.k) for _ in engine.replicas]
        """What speculation did for all requests of each replica."""
        self._live: dict[str, LiveRequest] = {}
        self._kept: list[Chunk] = []
        """Chunks of requests that other callers wait for."""

    @functools.cached_property
    def dialect(self) -> Dialect:
        """How the target writes the answers of conversations."""
        return find_dialect(self.tokenizer, self.chat_config)

    @functools.cached_property
    def _added_tokens(self) -> dict[str, int]:
        """Ids of texts that are one token each, and no text to a grammar; added words are text."""
        added = self.tokenizer.added_tokens_decoder.items()
        return {
            token.content: n
            for n, token in added
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }

    @functools.cached_property
    def _special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens that the target knows, by their text."""
        added = self.tokenizer.added_tokens_decoder.items()
        known = ((token.content, n) for n, token in added if token.special)
        return {text: n for text, n in known if n < self.engine.vocab_size}

    @property
    def beyond_training(self) -> str | None:
        """A warning when K is larger than the drafter was trained for, else None."""
        drafter = self.engine.facts.drafter
        trained = drafter.trained_tokens if drafter else None
        if trained is None or self.k <= trained:
            return None
        return f"K = {self.k} is beyond the {trained} tokens the drafter was trained for"

    def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        params: Sampled = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **variables: Any,
    ) -> list[Completion]:
        """Answer every conversation, in order; `Completion.message` holds thoughts and calls.

        Arguments are those of `render`. Raises `InputError` before any of them runs.
        """
        use = ToolUse(tuple(map(Tool.of, tools))) if tools else None
        prompts = [self.render(messages, tools, **variables) for messages in conversations]
        return list(self.completions(prompts, params, ChatTurn(use)))

    def generate(self, prompts: Sequence[Prompt], params: Sampled = None) -> list[Completion]:
        """Complete every prompt, in order. Raises `InputError` before any of them runs."""
        return list(self.completions(prompts, params))

    def completions(
        self, prompts: Sequence[Prompt], params: Sampled = None, chat: ChatTurn | None = None
    ) -> Iterator[Completion]:
        """Like `generate`, but yield each completion once it and those before it are finished.

        chat: that the prompts are conversations. Leaving the loop early cancels the rest.
        """
        pairs = zip(prompts, _per_prompt(params, len(prompts)), strict=True)
        return self._completions([self.prepare(prompt, how, chat) for prompt, how in pairs])

    def _completions(self, prepared: Sequence[Prepared]) -> Iterator[Completion]:
        """As `completions`, of requests that are ready."""
        ids: list[str] = []
        try:
            for request in prepared:
                ids.append(self.submit(request, followed=False))
            done: dict[str, Completion] = {}
            wanted = set(ids)
            for request_id in ids:
                while request_id not in done:
                    chunks = self._step_for(wanted)
                    done |= {c.request_id: c.completion for c in chunks if c.completion}
                yield done.pop(request_id)
        finally:
            for request_id in ids:
                self.cancel(request_id)

    def complete(self, request: Prepared) -> Completion:
        """Run one request that is ready to its end."""
        [completion] = self._completions([request])
        return completion

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, chat: ChatTurn | None = None
    ) -> Iterator[Chunk]:
        """Complete one prompt, chunk by chunk; leaving the loop early cancels it."""
        request_id = self.submit(self.prepare(prompt, params or SamplingParams(), chat))
        finished = False
        try:
            while not finished:
                for chunk in self._step_for({request_id}):
                    finished = chunk.completion is not None
                    yield chunk
        finally:
            self.cancel(request_id)

    def prepare(
        self, prompt: Prompt, params: SamplingParams, chat: ChatTurn | None = None
    ) -> Prepared:
        """Encode a prompt and compile what binds its answer; callable from any thread.

        chat: that the prompt is a conversation. Raises `InputError` for a request that cannot run
        as asked.
        """
        params = self._with_stop_tokens(params, chat)
        is_cut = params.truncate_prompt_tokens is not None
        tokens = self._truncated(self.encode(prompt, is_cut), params)
        self.engine.facts.check(tokens, params)
        wanted = params.structured_outputs
        if wanted is not None and wanted.structural_tag is not None:
            wanted = StructuredOutputs(grammar=lark_of(wanted.structural_tag, self._added_tokens))
        if wanted is not None:
            wanted = kept_form(wanted)
            refuse_added_tokens(wanted, self._added_tokens)
        if chat is not None:
            rule = lark_rule(wanted) if wanted is not None else None
            use = chat.use.kept if chat.use and needs_grammar(chat.use, rule) else chat.use
            grammar = self.dialect.grammar(tokens, use, rule)
            wanted = StructuredOutputs(grammar=grammar) if grammar is not None else None
        if wanted is not None:  # it ends where it is complete, that of required calls as well
            params = params.model_copy(update={"min_tokens": 0, "ignore_eos": False})
        thoughts, budget = None, params.thinking_token_budget
        if chat is not None and budget is not None and budget + 1 < params.max_tokens:
            span = self.dialect.thought_span(tokens)
            thoughts = None if span is None else (span, budget)
        return Prepared(tokens, params, self._form(wanted, params, thoughts), chat)

    def _form(
        self,
        wanted: StructuredOutputs | None,
        params: SamplingParams,
        thoughts: tuple[ThoughtSpan, int] | None,
    ) -> Form | None:
        """What the output must keep to, compiled; None: nothing. thoughts: as in `Form`."""
        endings = endings_of(params.bad_words, self.tokenizer, self.engine.vocab_size)
        grammar = None if wanted is None else written(wanted)
        if grammar is not None:
            in_sandbox(try_form, grammar)  # refuses what is too complex
        form = Form(grammar, params.allowed_token_ids, endings, thoughts)
        if form.grammar is None and not form.has_rules and thoughts is None:
            return None
        self.engine.compile(form)
        return form

    def _with_stop_tokens(self, params: SamplingParams, chat: ChatTurn | None) -> SamplingParams:
        """Parameters that stop at the special tokens named in `stop`, which no text may show, and
        where the dialect's answers end."""
        ids = [self._special_tokens[text] for text in params.stop if text in self._special_tokens]
        if chat is not None and not params.ignore_eos:
            facts = self.engine.facts
            others = set(self.dialect.ends(chat.use)).difference(facts.end_tokens)
            ids += [token for token in sorted(others) if token < facts.vocab_size]
        if not ids:
            return params
        return params.model_copy(update={"stop_token_ids": (*params.stop_token_ids, *ids)})

    def _truncated(self, tokens: list[int], params: SamplingParams) -> list[int]:
        """A prompt's last tokens, as many as the request wants to keep."""
        most = params.truncate_prompt_tokens
        if most is None:
            return tokens
        if most < 0:
            most = max(self.engine.max_length - params.max_tokens, 1)
        return tokens[max(len(tokens) - most, 0) :]

    def build_grammars(self) -> None:
        """Make what structured outputs need of the tokenizer, which takes seconds for a large one.

        Without it the first request that needs it waits, and others with it.
        """
        with contextlib.suppress(InputError):  # not installed, or no end of text: told when asked
            self._form(StructuredOutputs(regex="a"), SamplingParams(), None)

    def submit(self, prepared: Prepared, followed: bool = True) -> str:
        """Queue a request and return its id; `step` runs it.

        followed: whether each step's part is wanted; else only one chunk comes, the last, which
        holds everything.
        """
        request_id, params = next(self.engine.ids), prepared.params
        replica = self.engine.add(request_id, prepared.tokens, params, prepared.form)
        reader = self._reader(prepared)
        self._live[request_id] = LiveRequest(prepared, reader, self.k, followed, replica)
        return request_id

    def _reader(self, prepared: Prepared) -> Reader:
        """What reads the answer to a request."""
        chat, params = prepared.chat, prepared.params
        use = chat.use if chat else None
        return Reader(
            self.dialect.parser(prepared.tokens, use) if chat else PlainText(),
            self.dialect.markers(use) if chat else Markers(),
            self._detokenizers(params.skip_special_tokens)(prepared.tokens),
            StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None,
            params.min_tokens,
            use.most if use else None,
            each=chat is not None and params.logprobs is not None,
        )

    def step(self) -> list[Chunk]:
        """Run one engine step, or read those that have come, and return what each request got.

        When it raises, all requests have ended.
        """
        came: dict[str, list[RequestOutput]] = {}
        try:
            outputs = self.engine.step()
        except Exception:
            for request_id in [*self._live]:
                self.cancel(request_id)
            raise
        for output in outputs:
            came.setdefault(output.request_id, []).append(output)
        now = time.perf_counter()
        kept, self._kept = self._kept, []
        for brought in came.values():
            if (chunk := self._read(brought, now)) is not None:
                kept.append(chunk)
        return kept

    def _step_for(self, ids: Set[str]) -> list[Chunk]:
        """One step's chunks of the requests `ids`; the others' are kept for the next step.

        Raises `EngineStepError` where none of them is left, since a step of another caller failed.
        """
        if ids.isdisjoint(self._live) and not any(c.request_id in ids for c in self._kept):
            raise EngineStepError("a step failed, and this request with it")
        chunks = self.step()
        self._kept = [chunk for chunk in chunks if chunk.request_id not in ids]
        return [chunk for chunk in chunks if chunk.request_id in ids]

    def close(self) -> None:
        """End an engine that runs in a process of its own."""
        self.engine.close()

    def cancel(self, request_id: str) -> None:
        """Drop a request; finished and unknown ids are ignored."""
        self._live.pop(request_id, None)
        self._kept = [chunk for chunk in self._kept if chunk.request_id != request_id]
        self.engine.abort(request_id)

    def _read(self, outputs: Sequence[RequestOutput], now: float) -> Chunk | None:
        """Read what steps gave a request; what it adds for those who follow it."""
        live = self._live[outputs[0].request_id]
        completion = reason = None
        for output in outputs:
            live.add(output, now, self.draft_totals[live.replica])
            if live.may_stop or output is outputs[-1]:
                reason = live.read(output.finish_reason)
            if reason is not None:  # what came behind a stop string is none of its cycles
                break
        if reason is not None and output.finish_reason is None:  # the engine knows nothing of it
            self.engine.abort(output.request_id, "stop")
        if reason is not None:
            completion = live.completion(output, reason)
            del self._live[output.request_id]
        if completion is None and not live.is_due:
            return None
        return live.chunk(output.request_id, completion)


def _per_prompt(params: Sampled, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InputError(f"{len(params)} sampling parameters for {count} prompts")
    return params
