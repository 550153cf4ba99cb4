"""`POST /v1/responses`."""

import contextlib

from fastapi import Request, Response

from peagle.server.body_route import validated
from peagle.server.chat import begin
from peagle.server.delivery import deliver
from peagle.server.errors import APIError
from peagle.server.parts import Parts
from peagle.server.protocol import ChatBody
from peagle.server.responses.answer import ResponsesAnswer
from peagle.server.responses.body import ResponsesBody
from peagle.server.responses.conversation import chat_fields
from peagle.server.responses.items import Items
from peagle.server.responses.tools import Tools
from peagle.server.service import Service


async def respond(body: ResponsesBody, request: Request) -> Response:
    """Continue a conversation of items, all of which the request holds."""
    service = Service.of(request)
    tools = Tools(body.tools or ())
    fields = chat_fields(body, tools)
    if not fields["messages"]:
        raise APIError(400, "input has nothing for the model to read", "input")
    chat = validated(ChatBody, fields)
    async with contextlib.AsyncExitStack() as running:
        job = await begin(service, chat, running)
        name, model = request.state.request_id, service.settings.model_names[0]
        items = Items(name, tools, body.summarizes_thoughts, body.carries_thoughts)
        answer = ResponsesAnswer(name, model, body, Parts(items.item), job)
        return await deliver(answer, job, bool(body.stream), request, running)
