"""Answers by our own engine."""

from collections.abc import Sequence
from typing import Any

from peagle.async_llm import AsyncLLM
from peagle.config import SamplingParams
from peagle.errors import ContextLengthError
from peagle.models.chat_template import render_chat
from peagle.regenerate.answers import Answer, NoAnswerError
from peagle.train.samples import Message


class EngineAnswerer:
    """Answers by a target loaded in this process, with or without a drafter."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._async = llm
        self._llm = llm.llm

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        """The prompt for the assistant's next turn. Raises `InputError`."""
        return render_chat(self._llm.tokenizer, messages, tools=tools, add_generation_prompt=True)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        params: SamplingParams,
    ) -> Answer:
        """The assistant's next turn."""
        text = self.render(messages, tools)
        return await self._answer(self._llm.tokenize(text, add_special_tokens=False), params)

    async def complete(self, prompt: str, params: SamplingParams) -> Answer:
        """What follows a text, without a chat template."""
        return await self._answer(self._llm.encode(prompt), params)

    async def _answer(self, tokens: list[int], params: SamplingParams) -> Answer:
        room = self._llm.engine.max_length
        if len(tokens) >= room:
            raise NoAnswerError(str(ContextLengthError(len(tokens), room)))
        completion = None
        async for chunk in self._async.stream(tokens, params):
            completion = chunk.completion
        assert completion is not None  # a stream ends with its completion
        if completion.failure is not None:
            raise NoAnswerError(f"an answer ended with an error: {completion.failure}")
        message = {"role": "assistant", "content": completion.text}
        return Answer(message, len(completion.token_ids), completion.finish_reason == "length")
