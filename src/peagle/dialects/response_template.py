"""Checkpoints that say themselves how to read their answers, by a `response_template`.

transformers does the reading. It works on text, so that every added token is a marker here, and its
text is handed on.
"""

import functools
import logging
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from peagle.dialects.events import Content, Event, Reasoning, whole_call
from peagle.dialects.json_calls import call_parts
from peagle.dialects.markers import Markers
from peagle.dialects.parser import Section
from peagle.dialects.section_dialect import SectionDialect
from peagle.dialects.sections import Trimmed
from peagle.dialects.tools import ToolUse

CALLS = "tool_calls"
SECTIONS: dict[str, Section] = {"content": "content", CALLS: "call"}
SECTIONS |= dict.fromkeys(("thinking", "reasoning", "reasoning_content"), "reasoning")
"""Fields of templates; others are hidden."""
log = logging.getLogger("peagle.dialects")


class ResponseTemplateParser:
    """Reads an answer with transformers' parser of a response template.

    Calls are said once they are complete. Where the parser fails, the rest is content.
    """

    def __init__(self, parser: Any, use: ToolUse) -> None:
        self._parser, self._use = parser, use
        self._field = ""
        """The region that is open."""
        self._text = Trimmed("", "")
        self.section: Section = "content"
        self._failed = False
        self._unread = ""
        """Text of the calls that are open."""
        for _ in self._events(parser.initial_events):
            pass  # what the prompt says is no answer, but leaves a state

    def text(self, text: str) -> Iterator[Event]:
        """Text and the texts of added tokens alike."""
        if self._failed:
            yield from [Content(text)] if text else []
        else:
            yield from self._read(lambda: self._parser.feed(text), text)

    def marker(self, name: str) -> Iterator[Event]:
        """An added token."""
        return self.text(name)

    def finish(self, ended: bool) -> Iterator[Event]:
        """What only the end decides. A call that a limit cut is left out."""
        if not self._failed and (ended or self._field != CALLS):
            yield from self._read(lambda: self._parser.finalize()[1], "")

    def _read(self, read: Callable[[], Iterable[dict[str, Any]]], text: str) -> Iterator[Event]:
        """What the parser reads of a text; where it fails, that and what is open is content."""
        try:
            found = read()
        except Exception as error:  # whatever a template's own patterns and types make of it
            log.warning(f"the response template does not fit the answer: {error}")
            self._failed, text = True, self._unread + text
            yield from [Content(text)] if text else []
        else:
            yield from self._events(found)

    def _events(self, found: Iterable[dict[str, Any]]) -> Iterator[Event]:
        for event in found:
            match event:
                case {"type": "region_chunk", "text": text} if self._field == CALLS:
                    self._unread += text
                case {"type": "region_open", "field": field}:
                    self._field, self._text = field, Trimmed(string.whitespace, string.whitespace)
                    self.section = SECTIONS.get(field, "marker")
                case {"type": "region_chunk", "text": text, "dirty": False}:
                    yield from self._said(self._text.feed(text))
                case {"type": "region_close", "field": field, "value": value}:
                    self.section, self._field, self._unread = "marker", "", ""
                    if field == CALLS:
                        yield from _calls(value, self._use)

    def _said(self, text: str) -> Iterator[Event]:
        if text and self.section == "reasoning":
            yield Reasoning(text)
        elif text and self.section == "content":
            yield Content(text)


class ResponseTemplateDialect(SectionDialect):
    """Reads by the checkpoint's template, and constrains as the dialect that it looks like."""

    @property
    def description(self) -> str:
        """The dialect in a few words."""
        return f"by the checkpoint's response template; forms: {super().description}"

    def markers(self, use: ToolUse | None) -> Markers:
        """All added tokens."""
        return self._added

    @functools.cached_property
    def _added(self) -> Markers:
        return Markers({token: text for text, token in self._tokenizer.get_added_vocab().items()})

    def parser(self, prompt: Sequence[int], use: ToolUse | None) -> ResponseTemplateParser:
        """A parser in the state that the prompt leaves."""
        tools = [
            {"type": "function", "function": {"name": tool.name, "parameters": dict(tool.schema)}}
            for tool in (use.tools if use is not None else ())
        ]
        prefix = self._tokenizer.decode(prompt, skip_special_tokens=False)
        return ResponseTemplateParser(
            self._tokenizer.get_response_parser(prefix=prefix, tools=tools or None),
            use or ToolUse(()),
        )


def _calls(value: Any, use: ToolUse) -> Iterator[Event]:
    """The calls of a region, in OpenAI's form or without its wrapper."""
    for call in value if isinstance(value, list) else [value]:
        name, arguments = call_parts(call, use)
        if name is None or arguments is None:
            log.warning(f"a tool call needs a name and an object, and is left out: {call!r:.200}")
        else:
            yield from whole_call(name, arguments)
