"""Answers in sections: thoughts between two markers, then content with calls among it."""

import logging
import string
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from peagle.dialects.events import CallBegin, Content, Event, Reasoning
from peagle.dialects.held_calls import HeldCalls
from peagle.dialects.markers import Markers
from peagle.dialects.parser import Section
from peagle.dialects.tools import Tool, ToolUse

log = logging.getLogger("peagle.dialects")


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks what it thinks."""

    name: str
    """The format's name, as vLLM's `--reasoning-parser` has it."""
    begin: str
    end: str
    heading: str = ""
    """What follows `begin` and is no thought."""
    begun: bool = False
    """Whether the model thinks from its first token on, without `begin`."""


class CallFormat(ABC):
    """How a model writes calls."""

    name: ClassVar[str]
    """The format's name, as vLLM's `--tool-call-parser` has it."""
    begin: ClassVar[str]
    """What opens a section of calls."""
    end: ClassVar[str] = ""
    """What closes a section of calls; empty where only the answer's end does."""
    also: ClassVar[str] = ""
    """Text that a call may begin with where the model left out `begin`; empty where none may."""
    inner: ClassVar[tuple[str, ...]] = ()
    """Markers within a call."""
    bare: ClassVar[str] = ""
    """First letter of an answer that is calls without any marker, escaped for a regular
    expression; empty where calls have markers."""
    separator: ClassVar[str] = "WS?"
    """What stands between two calls, in Lark; empty where one section holds all of them."""
    handover: ClassVar[str] = ""
    """The token after which the model waits for what its calls return; empty where none is."""

    @abstractmethod
    def reader(self, use: ToolUse, marked: bool) -> HeldCalls:
        """A reader of one section; `marked`: whether a marker opened it."""

    def rules(self, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        """Lark rules of a section, of which the first is `call`.

        opening: the symbol of `begin`.
        """
        names = [f"call_{index}" for index in range(len(use.tools))]
        rules = self._section(" | ".join(names), use, markers, opening)
        for name, tool in zip(names, use.tools, strict=True):
            rules += self._call(name, tool, markers)
        return rules

    @abstractmethod
    def _section(self, either: str, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        """The rule `call`, and what all calls share. either: the symbols of the tools' calls."""

    @abstractmethod
    def _call(self, name: str, tool: Tool, markers: Markers) -> list[str]:
        """The rules of a call of one tool, of which the first is `name`."""


class Trimmed:
    """Text as it comes, without some characters at its beginning and at its end.

    heading: a text that is left out, too, where it stands before all else.
    """

    def __init__(self, leading: str, trailing: str, heading: str = "") -> None:
        self._leading, self._trailing, self._heading = leading, trailing, heading
        self._begun = False
        self._held = ""

    def feed(self, text: str) -> str:
        """What is surely within the edges."""
        text = self._held + text
        if self._heading.startswith(text):  # so far; it may be whole
            self._held = text
            return ""
        if not self._begun:
            text, self._heading = text.removeprefix(self._heading).lstrip(self._leading), ""
            self._begun = bool(text)
        kept = text.rstrip(self._trailing)
        self._held = text[len(kept) :]
        return kept

    def release(self) -> str:
        """The text that was held back as a possible end."""
        held, self._held = self._held, ""
        return held


class Sections:
    """Reads thoughts, content and calls.

    Line ends around thoughts, and white space before a call or after all calls, belong to no
    section. A call that a limit cuts stays as far as it was shown.

    use: the tools; None where calls are not wanted, and stay content, whatever their format.
    thinking: whether the prompt ends within thoughts.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat,
        use: ToolUse | None,
        thinking: bool,
    ) -> None:
        # begin of thoughts          end of thoughts            begin of calls
        # ──────────────▶ reasoning ────────▶ marker ──text──▶ content ◀──────────────▶ call
        #                  │                                             end, or no call
        #                  └ a marker of calls: rehearsed, until what follows says what it was
        self._reasoning, self._calls, self._use = reasoning, calls, use
        self.section: Section = "reasoning" if thinking else "content"
        heading = "" if reasoning is None or thinking else reasoning.heading
        self._thoughts = Trimmed("\n", "\n", heading)
        self._rehearsal: Rehearsal | None = None
        """Thoughts from the first call on, if there is one."""
        self._content = self._new_content()
        self._answered = False
        """Whether there was content or a call."""
        self._call: HeldCalls | None = None
        self._marked = False
        """Whether a marker opened the section of calls."""
        self._begin = ""
        """The marker that opened it, unless this is the call's own text."""
        self._read_one = False
        """Whether the section that a marker opened has had a call."""
        self._called = False
        if not thinking:
            self._expect_bare_call()

    def text(self, text: str) -> Iterator[Event]:
        """Text between markers."""
        if self._rehearsal is not None:
            yield from self._rehearse(self._rehearsal, text, is_marker=False)
        elif self.section == "reasoning":
            yield from self._think(text)
        elif self._call is not None:
            yield from self._read(self._call.feed(text))
        else:
            yield from self._answer(text)

    def marker(self, name: str) -> Iterator[Event]:
        """One of the dialect's markers; where it marks nothing, it is text."""
        call, calls, reasoning = self._call, self._calls, self._reasoning
        if self.section == "reasoning":
            yield from self._think_marker(name)
        elif reasoning is not None and name == reasoning.begin and not self._answered:
            self.section, self._call = "reasoning", None
        elif self._use is None:
            yield from self._answer(name)
        elif call is not None and call.keeps(name):
            yield from self._read(call.marker(name))
        elif call is None or not self._marked or name == calls.begin:
            yield from self._open(name, self._use)
        elif name == calls.end:
            yield from self._close(call, name)
        elif name in calls.inner:
            yield from self._read(call.marker(name))
        else:
            yield from self.text(name)

    def finish(self, ended: bool) -> Iterator[Event]:
        """Say what was held back."""
        yield from self._settle(ended)
        call = self._call
        if call is not None and (call.within or self._marked) and (ended or call.over):
            yield from self._close(call, "")
        elif call is not None and not self._marked and not call.within:
            yield from self._answer(call.held)
        # white space before a call belongs to no section
        rest = self._content.release()
        if rest and not self._called:
            yield Content(rest)

    def _think_marker(self, name: str) -> Iterator[Event]:
        """A marker within thoughts, perhaps of a call: their end tells what that is."""
        assert self._reasoning is not None
        opens = self._use is not None and name in (self._calls.begin, self._calls.also)
        if name == self._reasoning.end:
            yield from self._settle(ended=False)
            self._end_thoughts()
        elif opens or self._rehearsal is not None:
            if self._rehearsal is None:
                # some models leave out the end of thoughts, others only think about a call
                self._rehearsal = Rehearsal(Sections(None, self._calls, self._use, thinking=False))
            yield from self._rehearse(self._rehearsal, name, is_marker=True)
        else:
            yield from self._think(name)

    def _rehearse(self, rehearsal: "Rehearsal", text: str, is_marker: bool) -> Iterator[Event]:
        """More thoughts after a marker of calls; they are held while a call may be among them."""
        rehearsal.add(text, is_marker)
        if rehearsal.refused:
            yield from self._settle(ended=False)

    def _settle(self, ended: bool) -> Iterator[Event]:
        """Calls within thoughts: rehearsed, or made if the answer ends without an end of thoughts.

        What only looks like a call is a thought.
        """
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is None:
            return
        if ended:
            rehearsal.finish()
        if ended and rehearsal.has_call:
            yield from rehearsal.events
        else:
            yield from self._think(rehearsal.text)

    def _think(self, text: str) -> Iterator[Event]:
        shown = self._thoughts.feed(text)
        if shown:
            yield Reasoning(shown)

    def _end_thoughts(self) -> None:
        self.section = "marker"  # up to the first letter of the content
        self._content = self._new_content(leading="\n")
        self._expect_bare_call()

    def _new_content(self, leading: str = "") -> Trimmed:
        return Trimmed(leading, string.whitespace if self._use is not None else "")

    def _answer(self, text: str) -> Iterator[Event]:
        shown = self._content.feed(text)
        if shown:
            self.section, self._answered = "content", True
            yield Content(shown)

    def _expect_bare_call(self) -> None:
        if self._use is not None and self._calls.bare:
            self._call, self._marked = self._calls.reader(self._use, marked=False), False

    def _open(self, name: str, use: ToolUse) -> Iterator[Event]:
        """Open a section of calls at a marker, or take one that opens none as text."""
        calls = self._calls
        if name not in (calls.begin, calls.also):
            yield from self.text(name)
            return
        if self._call is not None and (self._marked or self._call.within):
            yield from self._close(self._call, "")
        elif self._call is not None:
            yield from self._answer(self._call.held)
        self._content.release()
        self._call, self._marked = calls.reader(use, marked=True), True
        self._read_one = False
        self.section, self._begin = "call", name if name == calls.begin else ""
        if name == calls.also:
            yield from self._read(self._call.feed(name))

    def _read(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            self.section, self._called, self._answered = "call", True, True
            self._read_one = True
            yield event
        call = self._call
        cut = self._marked and self._read_one  # what follows a call may be half of its end
        if call is not None and call.refused and not cut:  # it was no call after all
            self.section, self._call = "content", None
            yield from self._unread(call, "") if self._marked else self._answer(call.held)

    def _close(self, call: HeldCalls, end: str) -> Iterator[Event]:
        """Close a section of calls at its end marker, if any; what is no call in it is content."""
        yield from self._read(call.finish())
        self.section, self._call = "content", None
        if call.held.strip() and not call.within:
            yield from self._unread(call, end)

    def _unread(self, call: HeldCalls, end: str) -> Iterator[Event]:
        """Say what is no call in a section as it was written, between the section's markers."""
        log.warning(f"a tool call cannot be read and stays text: {call.held[:200]!r}")
        yield from self._answer(f"{self._begin}{call.held}{end}")


class Rehearsal:
    """Thoughts from a marker of calls on, read as if they were the answer.

    answer: reads them.
    """

    def __init__(self, answer: Sections) -> None:
        self._answer = answer
        self.text, self.has_call = "", False
        self.events: list[Event] = []

    @property
    def refused(self) -> bool:
        """Whether there was text instead of a call."""
        return bool(self.events) and not self.has_call

    def add(self, text: str, is_marker: bool) -> None:
        """Read more thoughts."""
        self.text += text
        self._take(self._answer.marker(text) if is_marker else self._answer.text(text))

    def finish(self) -> None:
        """Read the answer's end."""
        self._take(self._answer.finish(ended=True))

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            self.has_call = self.has_call or isinstance(event, CallBegin)
            self.events.append(event)
