"""Answers, and what gives them: our engine, or a server."""

from dataclasses import dataclass
from typing import Any, Protocol

from peagle.config import SamplingParams
from peagle.train.samples import Chat, Message


@dataclass(frozen=True)
class Regeneration:
    """What the target wrote, and how it ended."""

    message: Message
    """An assistant's turn, with thoughts as `reasoning_content`; for a completion, `content` is the
    text."""
    tokens: int
    cut: bool = False
    """Whether a limit on tokens or the context ended it, rather than the target."""
    token_ids: tuple[int, ...] = ()
    """What the target wrote, its end included; empty where a server does not tell."""
    prompt_ids: tuple[int, ...] = ()
    """What it read before; empty as well."""

    @property
    def written(self) -> dict[str, Any]:
        """The ids as they are kept beside a message or response."""
        return {"token_ids": self.token_ids} if self.token_ids else {}


class NoAnswerError(Exception):
    """No answer: the context is full, the server refuses the request, or it ended in an error."""


class Answerer(Protocol):
    """Gives the target's answers, many at once.

    Both methods raise `NoAnswerError`, and `InputError` when the target cannot be asked at all.
    """

    async def chat(self, asked: Chat, params: SamplingParams) -> Regeneration:
        """The assistant's next turn of a conversation."""

    async def complete(self, prompt: str, params: SamplingParams) -> Regeneration:
        """What follows a text, without a chat template."""
