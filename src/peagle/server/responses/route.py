"""`POST /v1/responses`: a response, whole or as the events of a stream."""

import time
from collections.abc import Iterator, Sequence
from functools import partial

from fastapi import Request, Response

from peagle.completion import Chunk, Completion
from peagle.server.answer import usage
from peagle.server.body_route import validated
from peagle.server.chat import answered
from peagle.server.delivery import WAITING, Json, event
from peagle.server.errors import APIError
from peagle.server.parts import Parts
from peagle.server.protocol import ChatBody
from peagle.server.responses.body import ResponsesBody
from peagle.server.responses.conversation import chat_fields
from peagle.server.responses.items import item
from peagle.server.responses.tools import Tools
from peagle.server.service import Job, Service

UNSET: Json = {"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
ECHOED = dict.fromkeys(("instructions", "max_output_tokens", "temperature", "top_p")) | UNSET
"""Fields of a request that a response repeats, and what it says of those that are left out."""


async def respond(body: ResponsesBody, request: Request) -> Response:
    """Continue a conversation of items, all of which the request holds."""
    tools = Tools(body.tools or ())
    fields = chat_fields(body, tools)
    if not fields["messages"]:
        raise APIError(400, "input has nothing for the model to read", "input")
    make = partial(ResponsesAnswer, body, request, tools)
    return await answered(validated(ChatBody, fields), request, make)


class ResponsesAnswer:
    """One response."""

    waiting = WAITING

    def __init__(self, body: ResponsesBody, request: Request, tools: Tools, job: Job) -> None:
        name = request.state.request_id
        self.id, self._job, self._told = f"resp_{name}", job, 0
        self._items = Parts(partial(item, name, body, tools))
        told = {*ECHOED, "text", "reasoning"}
        given = body.model_dump(include=told, by_alias=True, exclude_none=True)
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": Service.of(request).settings.model_names[0],
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **{name: given.get(name, usual) for name, usual in ECHOED.items()},
            "text": {"format": {"type": "text"}, **given.get("text", {})},
            "reasoning": {"effort": None, "summary": None, **given.get("reasoning", {})},
        }

    def whole(self, done: Sequence[Completion]) -> Json:
        """The answer as one object."""
        [completion] = done
        self._items.take(completion.events, completion.is_cut)
        return self._finished(completion)

    def begin(self) -> Iterator[bytes]:
        """That it is written now."""
        response = self._response("in_progress")
        yield self._event({"type": "response.created", "response": response})
        yield self._event({"type": "response.in_progress", "response": response})

    def add(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """What a chunk says of its items."""
        return map(self._event, self._items.read(chunk.events))

    def end(self, done: Sequence[Completion]) -> Iterator[bytes]:
        """The end of the last item, and the whole response."""
        [completion] = done
        yield from map(self._event, self._items.close(completion.is_cut))
        response = self._finished(completion)
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def fail(self, refusal: APIError) -> bytes:
        """The response with its error."""
        error = {"code": "server_error", "message": refusal.message}
        response = self._response("failed") | {"error": error}
        return self._event({"type": "response.failed", "response": response})

    def _event(self, data: Json) -> bytes:
        self._told += 1
        return event({**data, "sequence_number": self._told - 1}, data["type"])

    def _finished(self, completion: Completion) -> Json:
        counts = _usage(usage(self._job, [completion]))
        if not completion.is_cut:
            return self._response("completed") | {"usage": counts}
        why = {"reason": "max_output_tokens"}
        return self._response("incomplete") | {"incomplete_details": why, "usage": counts}

    def _response(self, status: str) -> Json:
        state = {"status": status, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **state, "output": [one.shown for one in self._items.done]}


def _usage(counts: Json) -> Json:
    """A chat completion's token counts under the names of responses."""
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    thoughts = counts["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": counts["total_tokens"],
        "speculation": counts["speculation"],
    }
