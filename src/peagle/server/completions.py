"""`POST /v1/completions`."""

import contextlib
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from peagle.completion import Chunk, Completion
from peagle.detokenizer import detokenize
from peagle.engine.step import TokenLogprobs
from peagle.server.answer import Choices
from peagle.server.delivery import Json, deliver
from peagle.server.errors import APIError
from peagle.server.protocol import CompletionBody
from peagle.server.sampling import sampling_params, structured_outputs
from peagle.server.service import Job, Service
from peagle.server.trace import TextOffsets, json_score

Given = str | list[int]
"""A prompt: a text, or token ids."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


async def complete(body: CompletionBody, request: Request) -> Response:
    """Complete one or several prompts."""
    service = Service.of(request, body.model)
    prompts, n, most = _prompts(body), body.choices, body.most_tokens(DEFAULT_MAX_TOKENS)
    form = structured_outputs(body, service.settings.limits)
    params = sampling_params(service, body, most, body.logprobs, form)
    async with contextlib.AsyncExitStack() as running:
        running.enter_context(service.admit(len(prompts) * n))
        if body.add_special_tokens is False:
            prompts = [
                await service.tokenize(prompt, False) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]
        job = await service.begin(prompts, params, n, running)
        choices = CompletionChoices(body, request, job, prompts)
        return await deliver(choices, job, bool(body.stream), request, running)


class CompletionChoices(Choices):
    """In the form of OpenAI's text completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, body: CompletionBody, request: Request, job: Job, prompts: Sequence[Given]
    ) -> None:
        """prompts: as the client gave them, each for `n` of the job's sequences."""
        super().__init__(body, request, job)
        self._body, tokenizer = body, Service.of(request).llm.tokenizer
        if body.truncate_prompt_tokens is not None:  # what is echoed is what the model saw
            prompts = [one.tokens for one in job.prepared[:: job.n]]
        said = [_said(tokenizer, prompt) if body.echo else "" for prompt in prompts]
        self._echo = [text for text in said for _ in range(job.n)]
        self._offsets = [TextOffsets() for _ in job.prepared]
        self._special = frozenset(tokenizer.all_special_ids)

    def choice(self, index: int, completion: Completion) -> Json:
        """A finished choice."""
        return {
            "index": index,
            "text": self._echo[index] + completion.text,
            "finish_reason": completion.finish_reason,
            "logprobs": self._logprobs(index, completion),
            **self._tokens.prompt_scores(completion, self._body.prompt_logprobs),
        }

    def deltas(self, index: int, chunk: Chunk) -> Sequence[Json]:
        """What a chunk adds to its choice."""
        echo = "" if index in self._begun else self._echo[index]
        delta: Json = {
            "index": index,
            "text": echo + chunk.text,
            "finish_reason": chunk.completion.finish_reason if chunk.completion else None,
            "logprobs": self._logprobs(index, chunk),
        }
        if self._body.traced:
            delta["speculation"] = self._tokens.trace(chunk)
        return [delta]

    def _logprobs(self, index: int, part: Completion | Chunk) -> Json | None:
        """Those of a part's tokens, behind those of the prompt if it is part of the text."""
        if self._body.logprobs is None:
            return None
        before = part.prompt_logprobs if self._body.echo else ()
        tokens = [*self._job.prepared[index].tokens[: len(before)], *part.token_ids]
        logprobs = [*before, *part.logprobs]
        return {
            "tokens": [*map(self._tokens.name, tokens)],
            "token_logprobs": [one and json_score(one.chosen) for one in logprobs],
            "top_logprobs": [one and self._top(one) for one in logprobs],
            "text_offset": [self._offset(index, token) for token in tokens],
        }

    def _offset(self, index: int, token: int) -> int:
        """The next token's place in the text, with the special tokens that the client wrote."""
        offsets, text = self._offsets[index], self._tokens.text(token)
        hidden = token in self._special and not self._echo[index].startswith(text, offsets.length)
        return offsets.add(b"" if hidden else self._tokens.data(token))

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        asked = logprobs.top[: self._body.logprobs]
        pairs = reversed(asked)  # among tokens with the same text the likeliest stays
        return {self._tokens.name(token): json_score(score) for token, score in pairs}


def _said(tokenizer: Any, prompt: Given) -> str:
    """A prompt as it stands before its completion."""
    return prompt if isinstance(prompt, str) else detokenize(tokenizer, prompt, skip_special=True)


def _prompts(body: CompletionBody) -> list[Given]:
    """The prompts, of which there is at least one."""
    prompt = body.prompt
    if not prompt and not isinstance(prompt, str):
        raise APIError(400, "the prompt is empty; give at least one token", "prompt")
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
