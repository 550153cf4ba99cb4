"""`POST /v1/chat/completions`."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request, Response

from peagle.config import StructuredOutputs
from peagle.engine.request import TokenLogprobs
from peagle.errors import InputError
from peagle.llm import Chunk, Completion
from peagle.models.chat_template import render_chat
from peagle.server.answer import Json, answer
from peagle.server.errors import APIError
from peagle.server.messages import Message
from peagle.server.protocol import ChatBody
from peagle.server.sampling import each_choice, sampling_params, structured_outputs
from peagle.server.service import Service
from peagle.server.tools import ToolParser, ToolUse
from peagle.server.trace import (
    json_score,
    speculation_trace,
    token_bytes,
    token_name,
    token_text,
)


async def chat(service: Service, body: ChatBody, request: Request) -> Response:
    """Continue a conversation."""
    service.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs", "top_logprobs")
    n, limits = body.choices, service.settings.limits
    service.check_choices(n)
    use = ToolUse.of(body, limits)
    structured = structured_outputs(body, limits)
    if use is not None and structured is not None:
        raise APIError(400, "tools and a response format exclude each other", "response_format")
    async with contextlib.AsyncExitStack() as running:
        running.enter_context(service.admit(n))
        variables = body.variables(use.tools if use else ())
        prompt = await render(service, body.messages, variables, bool(body.add_special_tokens))
        params = sampling_params(
            body,
            service.llm.sampling_defaults,
            limits,
            body.max_completion_tokens or body.max_tokens or service.room_after(prompt),
            (body.top_logprobs or 0) if body.logprobs else None,
            StructuredOutputs(grammar=use.grammar) if use else structured,
        )
        job = await service.begin([prompt], each_choice(params, n), running)
        form = ChatForm(service.llm.tokenizer, body, use)
        return await answer(service, form, job, body, request, running)


async def render(
    service: Service,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    add_special_tokens: bool = False,
) -> list[int]:
    """Messages -> token ids through the chat template, which transformers runs in a sandbox."""
    return await asyncio.to_thread(_render, service, messages, variables, add_special_tokens)


def _render(
    service: Service,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    add_special_tokens: bool,
) -> list[int]:
    tokenizer, template = service.llm.tokenizer, service.settings.chat_template
    if template is None and tokenizer.chat_template is None:
        raise APIError(400, "this model has no chat template; start with --chat-template FILE")
    turns = [message.turn for message in messages]
    try:
        text = render_chat(tokenizer, turns, template, **variables)
    except InputError as error:
        raise APIError(400, str(error), "messages") from None
    return service.llm.tokenize(text, add_special_tokens)


class ChatForm:
    """Puts completions into the form of OpenAI's chat completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Any, body: ChatBody, use: ToolUse | None) -> None:
        self._tokenizer, self._body = tokenizer, body
        self._parsers = [ToolParser(use.required) if use else None for _ in range(body.choices)]
        self._begun: set[int] = set()

    def choice(self, index: int, completion: Completion) -> Json:
        """A finished choice."""
        message: Json = {"role": "assistant", "content": completion.text}
        parser = self._parsers[index]
        reason: str | None = completion.finish_reason
        if parser is not None:
            content, calls = parser.feed(completion.text, finished=True)
            message["content"] = content
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
                reason = _reason(parser, reason)
        return {
            "index": index,
            "message": message,
            "finish_reason": reason,
            "logprobs": self._logprobs(completion.token_ids, completion.logprobs),
        }

    def delta(self, index: int, chunk: Chunk) -> Json:
        """What a chunk adds to its choice; a tool call comes whole, once it is complete."""
        delta: Json = {} if index in self._begun else {"role": "assistant", "content": ""}
        self._begun.add(index)
        parser, text = self._parsers[index], chunk.text
        reason = chunk.completion.finish_reason if chunk.completion else None
        if parser is not None:
            text, calls = parser.feed(text, finished=reason is not None)
            if calls:
                numbered = enumerate(calls, start=parser.calls - len(calls))
                delta["tool_calls"] = [{"index": place, **call} for place, call in numbered]
            reason = _reason(parser, reason)
        if text:
            delta["content"] = text
        choice: Json = {
            "index": index,
            "delta": delta,
            "finish_reason": reason,
            "logprobs": self._logprobs(chunk.token_ids, chunk.logprobs),
        }
        if self._body.traced:
            choice["speculation"] = speculation_trace(self._tokenizer, chunk)
        return choice

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json | None:
        if not self._body.logprobs:
            return None
        pairs = zip(tokens, logprobs, strict=True)
        return {
            "content": [
                self._scored(token, one.chosen)
                | {"top_logprobs": [self._scored(*pair) for pair in one.top]}
                for token, one in pairs
            ],
            "refusal": None,
        }

    def _scored(self, token: int, score: float) -> Json:
        data = token_bytes(self._tokenizer, token, token_text(self._tokenizer, token))
        name = token_name(self._tokenizer, token, self._body.return_tokens_as_token_ids)
        return {"token": name, "logprob": json_score(score), "bytes": list(data)}


def _reason(parser: ToolParser, reason: str | None) -> str | None:
    """An answer that ended by itself after tool calls waits for their results."""
    return "tool_calls" if reason == "stop" and parser.calls else reason
