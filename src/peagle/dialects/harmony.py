"""Harmony, the format of GPT-OSS: an answer of several messages, each with a channel.

<|channel|>analysis<|message|>…<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
<|start|>assistant<|channel|>final<|message|>…<|return|>
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from peagle.dialects.arguments import as_arguments
from peagle.dialects.dialect import needs_grammar
from peagle.dialects.events import Content, Event, Reasoning, whole_call
from peagle.dialects.markers import Markers
from peagle.dialects.object_calls import ObjectCalls
from peagle.dialects.parser import Section
from peagle.dialects.tools import ToolUse

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
NEEDED = (START, CHANNEL, MESSAGE, END)
"""Markers without which it is another format."""
NAMES = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
FUNCTIONS = "functions."
RECIPIENT = re.compile(r"\bto=(\S+)")
READERS = ("", "user", "assistant", "all")
"""Recipients whose messages a client sees."""
BEFORE_CHANNEL = re.compile(r"(?:assistant)?\s*(?:to=?\S*\s*|t)?\Z|[asitn]*\Z")
"""What a header's text may be before it names a channel; an answer without header is another."""
log = logging.getLogger("peagle.dialects")


class HarmonyCall(ObjectCalls):
    """Reads a message that is a call: its arguments."""

    def __init__(self, use: ToolUse, name: str) -> None:
        super().__init__(use)
        self._name = name

    @property
    def complete(self) -> bool:
        """Whether the arguments have ended."""
        return self._read == self._after

    def finish(self) -> Iterator[Event]:
        """Complete the call; arguments that are no object may be its only one."""
        yield from super().finish()
        if self.within:
            return
        given = as_arguments(self.held, self._use.arguments_of(self._name))
        self.refused = given is None
        if given is not None:
            yield from whole_call(self._name, given)
            self.held, self._read = "", self._after

    def _head(self) -> Iterator[Event]:
        if self.held.lstrip().startswith("{"):
            yield from self._begin(self._name, 0)

    def _after(self) -> Iterator[Event]:
        yield from ()


class HarmonyParser:
    """Reads messages by their channel and recipient.

    To a tool of the request, or any function: a call. In `analysis`: a thought. In `final`, or in
    `commentary` to nobody: content. To another tool: hidden, since clients have no such tool.

    A call whose text is no object, and not its only argument, is content.

    use: the tools; without any, messages to functions are content.
    """

    def __init__(self, use: ToolUse | None) -> None:
        self._use = use
        self.section: Section = "marker"
        self._header: dict[str, str] | None = None
        """Text of the header that is being written, by the marker before it."""
        self._hidden = False
        self._begun: set[Section] = set()
        """Kinds of messages that have text, which the next one's is set off from."""
        self._fresh = False
        """Whether the message has no text yet."""
        self._call: HarmonyCall | None = None

    def text(self, text: str) -> Iterator[Event]:
        """Text of a header or of a message."""
        if self._header is not None:
            part = next(reversed(self._header))
            self._header[part] += text
            if part == START and not BEFORE_CHANNEL.match(self._header[part]):
                stray = self._header[part].removeprefix("assistant")
                self._open("content")
                yield from self._write(stray)
        elif self.section != "marker":
            yield from self._write(text)
        elif stray := text.lstrip():
            log.warning(f"text between two messages is content: {stray[:200]!r}")
            self._open("content")
            yield from self._write(stray)

    def marker(self, name: str) -> Iterator[Event]:
        """One of the format's markers; within a string of a call's arguments it is text."""
        if self._call is not None and self._call.keeps(name):
            yield from self._write(name)
            return
        if name == START or (name == CHANNEL and self._header is None):
            yield from self._close()
            self._header = {START: ""}
        if self._header is not None and name in (CHANNEL, CONSTRAIN):
            self._header[name] = ""
        elif self._header is not None and name == MESSAGE:
            self._begin(self._header)
        elif name in (END, CALL, RETURN):
            yield from self._close()

    def finish(self, ended: bool) -> Iterator[Event]:
        """The token that ends a call also ends the answer."""
        if ended:
            yield from self._close()

    def _begin(self, header: dict[str, str]) -> None:
        """A message, by its header."""
        recipient = RECIPIENT.search(" ".join(header.values()))
        to = recipient[1] if recipient else ""
        if self._use is not None and (to in self._use.names or to.startswith(FUNCTIONS)):
            self._open("call")
            name = to if to in self._use.names else to.removeprefix(FUNCTIONS)
            self._call = HarmonyCall(self._use, name)
            return
        thought = header.get(CHANNEL, "").split()[:1] == ["analysis"]
        self._open("reasoning" if thought else "content")
        self._hidden = to not in READERS and not to.startswith(FUNCTIONS)

    def _open(self, section: Section) -> None:
        self.section, self._header, self._hidden = section, None, False
        self._fresh, self._call = True, None

    def _write(self, text: str) -> Iterator[Event]:
        if self._hidden or not text:
            return
        if self._call is not None:
            yield from self._read(self._call, self._call.feed(text))
            return
        apart = "\n" if self._fresh and self.section in self._begun else ""
        self._fresh = False
        self._begun.add(self.section)
        yield Reasoning(apart + text) if self.section == "reasoning" else Content(apart + text)

    def _read(self, call: HarmonyCall, events: Iterable[Event]) -> Iterator[Event]:
        """What a call says. Once it is complete, its message is over."""
        yield from events
        if call.complete:
            self.section, self._call = "marker", None
            yield from self.text(call.held)
        elif call.refused:
            log.warning(f"arguments that are no object are content: {call.held[:200]!r}")
            self._open("content")
            yield from self._write(call.held)

    def _close(self) -> Iterator[Event]:
        """The end of a message, or of a header without one."""
        if self._call is not None:
            yield from self._read(self._call, self._call.finish())
        self._open("marker")


class HarmonyDialect:
    """GPT-OSS's: every message has a header."""

    description = "reasoning and tool calls as openai (harmony)"

    def __init__(self, tokenizer: Any) -> None:
        self._markers = Markers(Markers.of(tokenizer, NAMES).ids)
        self._decode: Callable[[Sequence[int]], str] = tokenizer.decode

    def markers(self, use: ToolUse | None) -> Markers:
        """The same with and without tools: without markers no channel can be told from another."""
        return self._markers

    def ends(self, use: ToolUse | None) -> tuple[int, ...]:
        """The ends of a call and of the last message."""
        ids = self._markers.ids
        return tuple(token for token, marker in ids.items() if marker in (CALL, RETURN))

    def thought_span(self, prompt: Sequence[int]) -> None:
        """None: after a message of thoughts another may follow."""

    def parser(self, prompt: Sequence[int], use: ToolUse | None) -> HarmonyParser:
        """A parser in the state that the prompt's last message leaves."""
        parser = HarmonyParser(use)
        ids = self._markers.ids
        start = next((i for i in reversed(range(len(prompt))) if ids.get(prompt[i]) == START), None)
        for token in prompt[start:] if start is not None else ():
            said = parser.marker(ids[token]) if token in ids else parser.text(self._decode([token]))
            for _ in said:
                pass  # what the prompt says is no answer
        return parser

    def grammar(self, prompt: Sequence[int], use: ToolUse | None, form: str | None) -> str | None:
        """Thoughts and remarks, then the last message: the form, a call, or either."""
        if not needs_grammar(use, form):
            return None
        if self.parser(prompt, use).section != "marker":  # the prompt has begun the last message
            return None if form is None else f"start: {form}"
        rule = self._markers.rule
        message, go_on = rule(MESSAGE), f'{rule(END)} {rule(START)} "assistant"'
        json_type = f'(" "? {rule(CONSTRAIN)} "json" | " json")?'
        last = []
        rules = [
            f'before: {rule(CHANNEL)} ("analysis" | "commentary") {message} ANYTHING? {go_on}',
            "ANYTHING: /(?s:.+)/",
        ]
        if use is None or not use.required:
            last.append("final")
            rules.append(f'final: {rule(CHANNEL)} "final" {json_type} {message} form')
            rules.append(f"form: {form or 'ANYTHING'}")
        for index, tool in enumerate(use.tools if use is not None else ()):
            name, channel = f"call_{index}", f'{rule(CHANNEL)} "commentary"'
            to = json.dumps(f" to={FUNCTIONS}{tool.name}")
            header = f"{channel} {to} {json_type} | {to} {channel} {json_type}"
            rules.append(f"{name}: ({header}) {message} {name}_arguments")
            rules.append(f"{name}_arguments: %json {json.dumps(tool.schema)}")
            last.append(name)
        return "\n".join([f"start: before* ({' | '.join(last)})", *rules])
