"""Content blocks: how each looks, and what a stream tells of it as it grows."""

from collections.abc import Iterator
from typing import ClassVar

from peagle.dialects.events import CallBegin, Event, Reasoning
from peagle.models.chat_template import readable_object
from peagle.server.delivery import Json
from peagle.server.parts import AnswerPart


class ContentBlock(AnswerPart):
    """One block."""

    delta: ClassVar[tuple[str, str]]
    """The type under which a stream tells more of its text, and the field with it."""

    def __init__(self, index: int) -> None:
        self._index, self._text = index, ""

    def begin(self) -> Iterator[Json]:
        """The block without text."""
        yield {"type": "content_block_start", "index": self._index, "content_block": self.shown}

    def add(self, text: str) -> Iterator[Json]:
        """More text."""
        self._text += text
        kind, field = self.delta
        yield self._told({"type": kind, field: text})

    def end(self, cut: bool) -> Iterator[Json]:
        """That nothing follows."""
        yield {"type": "content_block_stop", "index": self._index}

    def _told(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class TextOutput(ContentBlock):
    """Content."""

    delta = "text_delta", "text"

    @property
    def shown(self) -> Json:
        """The block as it is now."""
        return {"type": "text", "text": self._text}


class ThinkingOutput(ContentBlock):
    """Thoughts. Clients send back only those that have a signature; nothing is proved by it."""

    delta = "thinking_delta", "thinking"

    def __init__(self, index: int, signature: str) -> None:
        super().__init__(index)
        self._signature, self._signed = signature, ""

    @property
    def shown(self) -> Json:
        """The block as it is now."""
        return {"type": "thinking", "thinking": self._text, "signature": self._signed}

    def end(self, cut: bool) -> Iterator[Json]:
        """The signature, and that nothing follows."""
        self._signed = self._signature
        yield self._told({"type": "signature_delta", "signature": self._signature})
        yield from super().end(cut)


class ToolUseOutput(ContentBlock):
    """A call."""

    delta = "input_json_delta", "partial_json"

    def __init__(self, index: int, call: CallBegin) -> None:
        super().__init__(index)
        self._call = call

    @property
    def shown(self) -> Json:
        """The call with as much of its arguments as can be read."""
        head = {"type": "tool_use", "id": self._call.id, "name": self._call.name}
        return {**head, "input": readable_object(self._text)}


def block(signature: str, index: int, opened: Event) -> ContentBlock:
    """The block that an event opens."""
    match opened:
        case Reasoning():
            return ThinkingOutput(index, signature)
        case CallBegin():
            return ToolUseOutput(index, opened)
    return TextOutput(index)
