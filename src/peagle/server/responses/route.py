"""`POST /v1/responses`."""

from functools import partial

from fastapi import Request, Response

from peagle.server.body_route import validated
from peagle.server.chat import answered
from peagle.server.errors import APIError
from peagle.server.protocol import ChatBody
from peagle.server.responses.answer import ResponsesAnswer
from peagle.server.responses.body import ResponsesBody
from peagle.server.responses.conversation import chat_fields
from peagle.server.responses.tools import Tools


async def respond(body: ResponsesBody, request: Request) -> Response:
    """Continue a conversation of items, all of which the request holds."""
    tools = Tools(body.tools or ())
    fields = chat_fields(body, tools)
    if not fields["messages"]:
        raise APIError(400, "input has nothing for the model to read", "input")
    make = partial(ResponsesAnswer, body, request, tools)
    return await answered(validated(ChatBody, fields), request, make)
