"""Answers, and what gives them: the engine here, or a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from peagle.config import SamplingParams
from peagle.train.samples import Message


@dataclass(frozen=True)
class Answer:
    """What the target wrote."""

    message: Message
    """As an assistant's turn; of a completion, `content` is the text."""
    tokens: int
    cut: bool = False
    """Whether a limit ended it, of tokens or of the context, and not the target."""


class NoAnswerError(Exception):
    """There is none: the target's context is full, a server refuses it, or it ended in an error."""


class Answerer(Protocol):
    """Gives the target's answers, many at once.

    Both methods raise `NoAnswerError`, and `InputError` when the target cannot be asked so.
    """

    async def chat(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        params: SamplingParams,
    ) -> Answer:
        """The assistant's next turn."""

    async def complete(self, prompt: str, params: SamplingParams) -> Answer:
        """What follows a text, without a chat template."""
