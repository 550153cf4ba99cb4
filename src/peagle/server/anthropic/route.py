"""`POST /v1/messages` and `/v1/messages/count_tokens`: a message, whole or as a stream's events."""

from collections.abc import Iterator, Sequence
from functools import partial

from fastapi import Request, Response

from peagle.completion import Chunk, Completion
from peagle.server.answer import usage
from peagle.server.anthropic.blocks import block
from peagle.server.anthropic.body import MessagesBody, chat_fields
from peagle.server.body_route import validated
from peagle.server.chat import answered, prompt_of
from peagle.server.delivery import Json, event
from peagle.server.errors import APIError
from peagle.server.parts import Parts
from peagle.server.protocol import ChatBody
from peagle.server.service import Job, Service
from peagle.server.tools import tool_use

NOTHING_CACHED = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


async def create_message(body: MessagesBody, request: Request) -> Response:
    """Continue a conversation, in Anthropic's form."""
    chat = validated(ChatBody, chat_fields(body))
    return await answered(chat, request, partial(MessagesAnswer, request))


async def count_tokens(body: MessagesBody, request: Request) -> dict[str, int]:
    """Count the tokens of a conversation, in Anthropic's form."""
    service = Service.of(request, body.model)
    chat = validated(ChatBody, chat_fields(body))
    prompt = await prompt_of(service, chat, tool_use(chat, service.settings.limits) is not None)
    return {"input_tokens": len(prompt)}


class MessagesAnswer:
    """One message."""

    waiting = event({"type": "ping"}, "ping")

    def __init__(self, request: Request, job: Job) -> None:
        name, model = request.state.request_id, Service.of(request).settings.model_names[0]
        self.id, self._blocks, self._job = f"msg_{name}", Parts(partial(block, name)), job
        self._head = {"id": self.id, "type": "message", "role": "assistant", "model": model}

    def whole(self, done: Sequence[Completion]) -> Json:
        """The answer as one object."""
        [completion] = done
        self._blocks.take(completion.events, completion.is_cut)
        content = [block.shown for block in self._blocks.done]
        counts = _usage(usage(self._job, done))
        return {**self._head, "content": content, **_stop(completion), "usage": counts}

    def begin(self) -> Iterator[bytes]:
        """The message without content; its prompt is counted, for clients that show how full the
        context is."""
        counts = {"input_tokens": self._job.prompt_tokens, "output_tokens": 0, **NOTHING_CACHED}
        stop: Json = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head, "content": [], **stop, "usage": counts}
        yield _event({"type": "message_start", "message": message})
        yield self.waiting

    def add(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """What a chunk says of its blocks."""
        return map(_event, self._blocks.read(chunk.events))

    def end(self, done: Sequence[Completion]) -> Iterator[bytes]:
        """The end of the last block, and why the message ends."""
        [completion] = done
        yield from map(_event, self._blocks.close(completion.is_cut))
        counts = _usage(usage(self._job, done))
        yield _event({"type": "message_delta", "delta": _stop(completion), "usage": counts})
        yield _event({"type": "message_stop"})

    def fail(self, refusal: APIError) -> bytes:
        """The error in place of the message's end."""
        return event(refusal.anthropic_body.model_dump(), "error")


def _event(data: Json) -> bytes:
    return event(data, data["type"])


def _stop(completion: Completion) -> Json:
    reason = "end_turn"
    if completion.is_cut:
        reason = "max_tokens"
    elif completion.stop_string is not None:
        reason = "stop_sequence"
    elif completion.message.calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": completion.stop_string}


def _usage(counts: Json) -> Json:
    """A chat completion's token counts under Anthropic's names: what was cached counts apart."""
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    thoughts = counts["completion_tokens_details"]["reasoning_tokens"]
    return {
        **NOTHING_CACHED,
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": thoughts},
        "speculation": counts["speculation"],
    }
