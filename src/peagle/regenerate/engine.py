"""Answers by our own engine."""

from collections.abc import Sequence
from typing import Any

from peagle.async_llm import AsyncLLM
from peagle.config import SamplingParams
from peagle.dialects import events
from peagle.dialects.tools import Tool, ToolUse
from peagle.encoder import Prompt
from peagle.errors import ContextLengthError, InputError
from peagle.live_request import ChatTurn
from peagle.regenerate.answers import NoAnswerError, Regeneration
from peagle.train.samples import Chat, Message


class EngineAnswerer:
    """Answers by a target loaded in this process, with or without a drafter."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._async = llm

    async def chat(self, asked: Chat, params: SamplingParams) -> Regeneration:
        """The assistant's next turn, read by the target's dialect."""
        tools = asked.tools or ()
        try:
            prompt = self._async.llm.render(asked.messages, tools, **asked.variables)
        except InputError as error:
            raise NoAnswerError(str(error)) from None
        return await self._answer(prompt, params, ChatTurn(tool_use(tools)))

    async def complete(self, prompt: str, params: SamplingParams) -> Regeneration:
        """What follows a text, without a chat template."""
        return await self._answer(prompt, params)

    async def _answer(
        self, prompt: Prompt, params: SamplingParams, chat: ChatTurn | None = None
    ) -> Regeneration:
        try:
            prepared = await self._async.prepare(prompt, params, chat)
        except ContextLengthError as error:
            raise NoAnswerError(str(error)) from None
        completion = await self._async.complete(prepared)
        if completion.failure is not None:
            raise NoAnswerError(f"an answer ended with an error: {completion.failure}")
        message, ids = _message(completion.message), completion.token_ids
        cut = completion.finish_reason == "length"
        return Regeneration(message, len(ids), cut, ids, tuple(prepared.tokens))


def tool_use(tools: Sequence[dict[str, Any]]) -> ToolUse | None:
    """The functions among a conversation's tools; the target is free to call them as it likes."""
    found = []
    for tool in tools:
        match tool.get("function", tool):
            case {"name": str(name), "parameters": dict(parameters)}:
                found.append(Tool(name, parameters))
            case {"name": str(name)}:
                found.append(Tool(name))
    return ToolUse(tuple(found)) if found else None


def _message(said: events.Message) -> Message:
    """What a client would send back."""
    message: Message = {"role": "assistant", "content": said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [_call(n, call) for n, call in enumerate(said.calls)]
    return message


def _call(number: int, call: events.Call) -> dict[str, Any]:
    """A call in OpenAI's form, with the same id in every run."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}
