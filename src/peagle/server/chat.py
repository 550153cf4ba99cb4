"""`POST /v1/chat/completions`."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response

from peagle.completion import Chunk, Completion
from peagle.dialects.events import CallArguments, CallBegin, Content, Event, Reasoning
from peagle.errors import InputError
from peagle.live_request import ChatTurn
from peagle.llm import LLM
from peagle.models.chat_template import hides_tools
from peagle.server.answer import Choices
from peagle.server.body import tell_once
from peagle.server.delivery import Answer, Json, deliver
from peagle.server.errors import APIError
from peagle.server.messages import MessageBody, tool_call
from peagle.server.protocol import ChatBody, TokenizeBody
from peagle.server.sampling import sampling_params, structured_outputs
from peagle.server.service import Job, Service
from peagle.server.tools import tool_use
from peagle.server.trace import json_score


async def chat(body: ChatBody, request: Request) -> Response:
    """Continue a conversation."""
    return await answered(body, request, partial(ChatChoices, body, request))


async def answered(body: ChatBody, request: Request, make: Callable[[Job], Answer]) -> Response:
    """Continue a conversation, and answer with what `make` makes of the sequences.

    Raises `APIError` or `InputError` for a request that cannot run as asked.
    """
    service = Service.of(request, body.model)
    if body.top_logprobs and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs", "top_logprobs")
    n, limits = body.choices, service.settings.limits
    use, form = tool_use(body, limits), structured_outputs(body, limits)
    likely = (body.top_logprobs or 0) if body.logprobs else None
    async with contextlib.AsyncExitStack() as running:
        running.enter_context(service.admit(n))
        prompt = await prompt_of(service, body, use is not None)
        most = body.most_tokens(max(service.llm.engine.max_length - len(prompt), 1))
        params = sampling_params(service, body, most, likely, form)
        params = params.model_copy(update={"thinking_token_budget": body.thought_tokens})
        job = await service.begin([prompt], params, n, running, ChatTurn(use))
        return await deliver(make(job), job, bool(body.stream), request, running)


async def prompt_of(
    service: Service, body: ChatBody | TokenizeBody, shows_tools: bool
) -> list[int]:
    """Token ids of a conversation, perhaps with its tools: those that the answer may call."""
    variables = body.variables((body.tools or ()) if shows_tools else ())
    given = body.messages or (), variables, bool(body.add_special_tokens)
    return await service.aside(render, service.llm, *given)


def render(
    llm: LLM, messages: Sequence[MessageBody], variables: dict[str, Any], add_special_tokens: bool
) -> list[int]:
    """Messages -> token ids through the chat template, which transformers runs in a sandbox."""
    if llm.chat_config.chat_template is None and llm.tokenizer.chat_template is None:
        raise APIError(400, "this model has no chat template; start with --chat-template FILE")
    turns = [message.turn for message in messages]
    if variables.get("tools") and hides_tools(llm.tokenizer, llm.chat_config.chat_template):
        tell_once("a request has tools, which the chat template does not show to the model")
    try:
        return llm.render(turns, add_special_tokens=add_special_tokens, **variables)
    except InputError as error:
        raise APIError(400, str(error), "messages") from None


class ChatChoices(Choices):
    """What was read of answers in the form of OpenAI's chat completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, request: Request, job: Job) -> None:
        super().__init__(body, request, job)
        self._body, self._calls = body, [0] * body.choices
        """Calls that each choice has begun."""

    def choice(self, index: int, completion: Completion) -> Json:
        """A finished choice."""
        said = completion.message
        message: Json = {"role": "assistant", "content": said.content}
        if said.reasoning:
            message |= self._thoughts(said.reasoning, said.content)
        if said.calls:
            message["tool_calls"] = [
                tool_call(call.id, call.name, call.arguments) for call in said.calls
            ]
        if said.calls or said.reasoning:
            message["content"] = message["content"] or None
        return {
            "index": index,
            "message": message,
            "finish_reason": _reason(completion),
            "logprobs": self._logprobs(completion),
        }

    def shared(self, done: Sequence[Completion]) -> Json:
        """The prompt's log-probabilities, which all choices share; where they are asked for."""
        return self._tokens.prompt_scores(done[0], self._body.prompt_logprobs)

    def deltas(self, index: int, chunk: Chunk) -> Sequence[Json]:
        """What a chunk adds to its choice: a delta for each event, none where nothing is said."""
        deltas = [delta for event in chunk.events if (delta := self._delta(index, event))]
        logprobs = self._logprobs(chunk)
        scored = (logprobs or {}).get("content")
        if not (deltas or chunk.completion or self._body.traced or scored):
            return ()
        deltas = deltas or [{}]
        if index not in self._begun:
            deltas[0] = {"role": "assistant", "content": "", **deltas[0]}
        choices: list[Json] = [
            {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
            for delta in deltas
        ]
        choices[-1]["logprobs"] = logprobs
        choices[-1]["finish_reason"] = _reason(chunk.completion) if chunk.completion else None
        if self._body.traced:
            choices[-1]["speculation"] = self._tokens.trace(chunk)
        return choices

    def _delta(self, index: int, event: Event) -> Json:
        match event:
            case Reasoning(text):
                return self._thoughts(text)
            case Content(text):
                return {"content": text}
            case CallBegin(name, identifier):
                self._calls[index] += 1
                call = tool_call(identifier, name, "")
            case CallArguments(text):
                call = {"function": {"arguments": text}}
            case _:
                return {}
        return {"tool_calls": [{"index": self._calls[index] - 1, **call}]}

    def _thoughts(self, text: str, content: str = "") -> Json:
        """Thoughts under both names that clients read, unless they want them otherwise.

        content: what follows the thoughts.
        """
        if self._body.include_reasoning is False:
            return {}
        if self._body.separate_reasoning is False:
            return {"content": text + content}
        return {"reasoning": text, "reasoning_content": text}

    def _logprobs(self, part: Completion | Chunk) -> Json | None:
        """The scores of a part's tokens of content."""
        if not self._body.logprobs:
            return None
        scored = zip(part.token_ids, part.sections, part.logprobs, strict=False)
        return {
            "content": [
                self._scored(token, one.chosen)
                | {"top_logprobs": [self._scored(*pair) for pair in one.top]}
                for token, section, one in scored
                if section == "content"
            ],
            "refusal": None,
        }

    def _scored(self, token: int, score: float) -> Json:
        name, data = self._tokens.name(token), self._tokens.data(token)
        return {"token": name, "logprob": json_score(score), "bytes": list(data)}


def _reason(completion: Completion) -> str:
    """An answer that ended by itself after tool calls waits for their results."""
    reason = completion.finish_reason
    return "tool_calls" if reason == "stop" and completion.message.calls else reason
