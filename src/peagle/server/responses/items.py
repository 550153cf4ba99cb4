"""Output items: how each looks, and what a stream tells of it as it grows."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from peagle.dialects.events import CallBegin, Event, Reasoning
from peagle.server.delivery import Json
from peagle.server.parts import AnswerPart
from peagle.server.responses.body import ResponsesBody
from peagle.server.responses.conversation import encoded
from peagle.server.responses.tools import CustomInput, ToolName, Tools

PLACE: Json = {"content_index": 0, "logprobs": []}
"""Of the text in a message, which is its only part."""


class OutputItem(AnswerPart):
    """One item.

    name: of the request, which is part of the item's id.
    """

    kind: ClassVar[str]
    prefix: ClassVar[str]
    """How its id begins."""

    def __init__(self, name: str, index: int) -> None:
        self._id, self._index = f"{self.prefix}_{name}_{index}", index
        self._status, self.text = "in_progress", ""

    @property
    def shown(self) -> Json:
        """The item as it is now."""
        return {"type": self.kind, "id": self._id, "status": self._status, **self._fields()}

    def begin(self) -> Iterator[Json]:
        """The item without text."""
        yield self._whole("response.output_item.added")
        yield from map(self._placed, self._opened())

    def add(self, text: str) -> Iterator[Json]:
        """More text."""
        yield from map(self._placed, self._grown(text))

    def end(self, cut: bool) -> Iterator[Json]:
        """The whole item."""
        yield from map(self._placed, self._closed())
        self._status = "incomplete" if cut else "completed"
        yield self._whole("response.output_item.done")

    @abstractmethod
    def _fields(self) -> Json:
        """What it has besides its type, id and status."""

    def _opened(self) -> Iterator[Json]:
        """Events after that of the item without text."""
        return iter(())

    @abstractmethod
    def _grown(self, text: str) -> Iterator[Json]:
        """Take more text; the events that tell of it."""

    @abstractmethod
    def _closed(self) -> Iterator[Json]:
        """Events before that of the whole item."""

    def _whole(self, kind: str) -> Json:
        return {"type": kind, "output_index": self._index, "item": self.shown}

    def _placed(self, event: Json) -> Json:
        return {**event, "item_id": self._id, "output_index": self._index}


class MessageOutput(OutputItem):
    """Content, as one part."""

    kind, prefix = "message", "msg"

    def _fields(self) -> Json:
        return {"role": "assistant", "content": [self._part()] if self.text else []}

    def _opened(self) -> Iterator[Json]:
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part()}

    def _grown(self, text: str) -> Iterator[Json]:
        self.text += text
        yield {"type": "response.output_text.delta", **PLACE, "delta": text}

    def _closed(self) -> Iterator[Json]:
        yield {"type": "response.output_text.done", **PLACE, "text": self.text}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self._part()}

    def _part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class ReasoningOutput(OutputItem):
    """Thoughts, as one part.

    summarized: whether they also stand in the summary, which is all that many clients show.
    carried: whether `encrypted_content` holds them, for clients that send back nothing else.
    """

    kind, prefix = "reasoning", "rs"

    def __init__(self, name: str, index: int, summarized: bool, carried: bool) -> None:
        super().__init__(name, index)
        self._summarized, self._carried = summarized, carried

    def _fields(self) -> Json:
        return {
            "summary": [self._part("summary_text")] if self._summarized and self.text else [],
            "content": [self._part("reasoning_text")] if self.text else [],
            "encrypted_content": encoded(self.text) if self._carried and self.text else None,
        }

    def _opened(self) -> Iterator[Json]:
        part = self._part("reasoning_text")
        yield {"type": "response.content_part.added", "content_index": 0, "part": part}
        if self._summarized:
            part, kind = self._part("summary_text"), "response.reasoning_summary_part.added"
            yield {"type": kind, "summary_index": 0, "part": part}

    def _grown(self, text: str) -> Iterator[Json]:
        self.text += text
        yield {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}
        if self._summarized:
            kind = "response.reasoning_summary_text.delta"
            yield {"type": kind, "summary_index": 0, "delta": text}

    def _closed(self) -> Iterator[Json]:
        part = self._part("reasoning_text")
        yield {"type": "response.reasoning_text.done", "content_index": 0, "text": self.text}
        yield {"type": "response.content_part.done", "content_index": 0, "part": part}
        if self._summarized:
            part, head = self._part("summary_text"), "response.reasoning_summary"
            yield {"type": f"{head}_text.done", "summary_index": 0, "text": self.text}
            yield {"type": f"{head}_part.done", "summary_index": 0, "part": part}

    def _part(self, kind: str) -> Json:
        return {"type": kind, "text": self.text}


class CallOutput(OutputItem):
    """A call, under the name that its client knows."""

    field: ClassVar[str]
    """Where its text stands."""

    def __init__(self, name: str, index: int, call_id: str, tool: ToolName) -> None:
        super().__init__(name, index)
        self._call = {"call_id": call_id, "name": tool.name}
        if tool.namespace is not None:
            self._call["namespace"] = tool.namespace

    def _fields(self) -> Json:
        return {**self._call, self.field: self.text}

    def _grown(self, text: str) -> Iterator[Json]:
        self.text += text
        if text:
            yield {"type": f"response.{self.kind}_{self.field}.delta", "delta": text}


class FunctionCallOutput(CallOutput):
    """A function's call; its text is the arguments."""

    kind, prefix, field = "function_call", "fc", "arguments"

    def _closed(self) -> Iterator[Json]:
        done = {"name": self._call["name"], "arguments": self.text}
        yield {"type": "response.function_call_arguments.done", **done}


class CustomCallOutput(CallOutput):
    """A custom tool's call; its text is the input, which a model writes as JSON."""

    kind, prefix, field = "custom_tool_call", "ctc", "input"

    def __init__(self, name: str, index: int, call_id: str, tool: ToolName) -> None:
        super().__init__(name, index, call_id, tool)
        self._input = CustomInput()

    def _grown(self, text: str) -> Iterator[Json]:
        return super()._grown(self._input.feed(text))

    def _closed(self) -> Iterator[Json]:
        yield from super()._grown(self._input.finish())
        yield {"type": "response.custom_tool_call_input.done", "input": self.text}


def item(name: str, body: ResponsesBody, tools: Tools, index: int, opened: Event) -> OutputItem:
    """The item that an event opens. name: of the request."""
    match opened:
        case Reasoning():
            return ReasoningOutput(name, index, body.summarizes_thoughts, body.carries_thoughts)
        case CallBegin(function, call_id):
            tool = tools.named(function)
            kind = CustomCallOutput if tool.custom else FunctionCallOutput
            return kind(name, index, call_id, tool)
    return MessageOutput(name, index)
