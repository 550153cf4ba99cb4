"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from functools import partial

from fastapi import Request, Response

from peagle.server.anthropic.answer import MessagesAnswer
from peagle.server.anthropic.body import MessagesBody
from peagle.server.anthropic.conversation import chat_fields
from peagle.server.body_route import validated
from peagle.server.chat import answered, prompt_of
from peagle.server.protocol import ChatBody
from peagle.server.service import Service
from peagle.server.tools import tool_use


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
