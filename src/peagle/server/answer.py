"""Answers as choices: OpenAI's completions and chat completions."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from fastapi import Request

from peagle.completion import Chunk, Completion
from peagle.server.delivery import WAITING, Json, event
from peagle.server.errors import APIError
from peagle.server.middleware import GIVEN_ID
from peagle.server.protocol import ChatBody, GenerationBody, StreamOptions
from peagle.server.service import Job, Service
from peagle.server.trace import TokenTexts
from peagle.speculation import DraftTotals

DONE = b"data: [DONE]\n\n"


class Choices(ABC):
    """One request's answer as choices; each route says what its own look like."""

    prefix: ClassVar[str]
    """Prefix of ids."""
    kind: ClassVar[str]
    """The `object` field of an answer."""
    chunk_kind: ClassVar[str]
    """The `object` field of a stream's chunk."""
    waiting = WAITING

    def __init__(self, body: GenerationBody, request: Request, job: Job) -> None:
        service = Service.of(request)
        if GIVEN_ID.fullmatch(body.request_id or ""):
            request.state.request_id = body.request_id
        self.id = f"{self.prefix}-{request.state.request_id}"
        self._head = {
            "id": self.id,
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": service.settings.model_names[0],
        }
        self._tokens = TokenTexts(service.llm.tokenizer, body.return_tokens_as_token_ids)
        self._job, self._asked = job, body
        self._wanted = body.stream_options or StreamOptions()
        self._written = 0
        self._unsaid: list[list[int]] = [[] for _ in job.prepared]
        """Tokens of which nothing could be shown yet."""
        self._begun: set[int] = set()
        """Choices of which something was told."""

    @abstractmethod
    def choice(self, index: int, completion: Completion) -> Json:
        """A finished choice."""

    @abstractmethod
    def deltas(self, index: int, chunk: Chunk) -> Sequence[Json]:
        """What a chunk adds to its choice, for a stream; perhaps nothing yet."""

    def shared(self, done: Sequence[Completion]) -> Json:
        """What an answer has besides its choices and its usage."""
        return {}

    def whole(self, done: Sequence[Completion]) -> Json:
        """The answer as one object."""
        choices = [self._ended(self.choice(n, one), one) for n, one in enumerate(done)]
        told = {"choices": choices, "usage": usage(self._job, done)}
        words = {**self._head, **told, **self.shared(done)}
        if self._asked.return_token_ids:
            for choice, completion in zip(choices, done, strict=True):
                self._add_ids(words, choice, completion.token_ids, completion.prompt_token_ids)
        return words

    def begin(self) -> Sequence[bytes]:
        """Nothing: a choice begins with its first delta."""
        return ()

    def add(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """An event for each delta."""
        self._written += len(chunk.token_ids)
        if self._asked.return_token_ids:
            self._unsaid[index] += chunk.token_ids
        choices = self.deltas(index, chunk)
        if chunk.completion is not None:
            *before, last = choices
            choices = [*before, self._ended(last, chunk.completion)]
        for choice in choices:
            words: Json = {**self._head, "choices": [choice]}
            if self._asked.return_token_ids:
                asked = None if index in self._begun else self._job.prepared[index].tokens
                self._add_ids(words, choice, self._unsaid[index], asked)
                self._unsaid[index] = []
            self._begun.add(index)
            if self._wanted.continuous_usage_stats:
                words["usage"] = _counts(self._job.prompt_tokens, self._written)
            yield event(words)

    def end(self, done: Sequence[Completion]) -> Iterator[bytes]:
        """The usage if requested, and that nothing follows."""
        if self._wanted.include_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._job, done)})
        yield DONE

    def fail(self, refusal: APIError) -> bytes:
        """The error in place of a delta."""
        return event(refusal.body.model_dump())

    def _add_ids(
        self, words: Json, choice: Json, tokens: Sequence[int], prompt: Sequence[int] | None
    ) -> None:
        """Add token ids as vLLM does: those of a conversation's prompt stand beside its choices."""
        choice["token_ids"] = tokens
        if prompt is not None:
            beside = isinstance(self._asked, ChatBody)
            (words if beside else choice)["prompt_token_ids"] = prompt

    def _ended(self, choice: Json, done: Completion) -> Json:
        """A choice with its times, if asked for, and why it ended with an error, where others did
        not."""
        times = {"metrics": _times(done)} if self._asked.return_metrics else {}
        failure = {} if done.failure is None else {"error": {"message": done.failure}}
        return choice | times | failure


def _times(done: Completion) -> Json:
    """A choice's seed, and its times as vLLM measures them: in the queue, from there to the first
    token, and between tokens."""
    count, took = len(done.token_times), done.seconds
    return {
        "seed": done.seed,
        "queue_time_ms": 1e3 * took["queue"],
        "time_to_first_token_ms": 1e3 * took["prefill"] if count else None,
        "generation_time_ms": 1e3 * took["decode"] if count else None,
        "mean_itl_ms": 1e3 * took["decode"] / (count - 1) if count > 1 else None,
        "tokens_per_second": count / took["inference"] if count else None,
    }


def usage(job: Job, done: Sequence[Completion]) -> Json:
    """Token counts of a request, and what speculation did for it."""
    cached = sum(completion.cached_tokens for completion in done[:: job.n])
    written = sum(len(completion.token_ids) for completion in done)
    did = DraftTotals.pooled([completion.speculation for completion in done])
    # the first token is nobody's draft, and drafts behind the last one are not in the answer
    kept = (min(one.speculation.accepted, max(len(one.token_ids) - 1, 0)) for one in done)
    return {
        **_counts(job.prompt_tokens, written),
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(kept),
            "rejected_prediction_tokens": did.drafted - did.accepted,
            "reasoning_tokens": sum(one.sections.count("reasoning") for one in done),
        },
        "speculation": {
            "cycles": did.cycles,
            "drafted": did.drafted,
            "accepted": did.accepted,
            "accepted_per_position": did.accepted_per_position,
            "acceptance_length": did.acceptance_length,
            "tokens_per_cycle": did.tokens_per_cycle,
        },
    }


def _counts(prompt: int, written: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
