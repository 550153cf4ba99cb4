"""Tool calls in the form most open models are trained on: `<tool_call>{"name": …}</tool_call>`.

A grammar constrains the model to it, so every call parses and fits the function's schema.
"""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from peagle.server.errors import APIError
from peagle.server.protocol import ChatBody, NamedTool, Tool
from peagle.server.sampling import check_schema
from peagle.server.settings import Limits

TRIGGER, END = "<tool_call>", "\n</tool_call>"
ARGUMENTS = ', "arguments": '
ANYTHING = {"type": "object"}


@dataclass(frozen=True)
class ToolUse:
    """The functions that a request lets the model call, and how."""

    tools: tuple[Tool, ...]
    required: bool
    """Whether the answer must consist of calls only."""
    most: int | None
    """Most calls; None is no limit."""

    @classmethod
    def of(cls, body: ChatBody, limits: Limits) -> "ToolUse | None":
        """The tools of a request; None without any. Raises `APIError`."""
        tools, choice = body.tools or [], body.tool_choice
        if not tools:
            if choice not in (None, "none"):
                raise APIError(400, "tool_choice needs tools", "tool_choice")
            return None
        if choice == "none":
            return None
        _check(tools, limits)
        one_at_a_time = body.parallel_tool_calls is False
        if isinstance(choice, NamedTool):
            named = tuple(t for t in tools if t.function.name == choice.function.name)
            if not named:
                raise APIError(400, f"no tool is called {choice.function.name}", "tool_choice")
            return cls(named, required=True, most=1)
        return cls(tuple(tools), choice == "required", 1 if one_at_a_time else None)

    @property
    def grammar(self) -> str:
        """The grammar of the answer, in Lark's notation."""
        names = [f"call_{index}" for index in range(len(self.tools))]
        rules = self._required() if self.required else self._optional()
        rules.append(f"call: open ({' | '.join(names)})")
        for name, tool in zip(names, self.tools, strict=True):
            head = json.dumps(f'\n{{"name": "{tool.function.name}"{ARGUMENTS}')
            schema = json.dumps(tool.function.parameters or ANYTHING)
            rules.append(f"{name}: {head} {name}_arguments {json.dumps('}' + END)}")
            rules.append(f"{name}_arguments: %json {schema}")
        return "\n".join(rules)

    def _required(self) -> list[str]:
        start = "call" if self.most == 1 else r'call ("\n"? call)*'
        return [f"start: {start}", f'open: "{TRIGGER}"']

    def _optional(self) -> list[str]:
        """Any text; after the trigger, a call must follow."""
        start = "call | REST" if self.most == 1 else "call* REST"
        return [f"start: {start}", f"open[lazy]: /(?s:.*){TRIGGER}/", "REST: /(?s:.*)/"]


class ToolParser:
    """Splits an answer as it comes into plain text and complete calls.

    White space before a call, and at the end after calls, is no text.

    only_calls: whether the answer may hold no text.
    """

    def __init__(self, only_calls: bool) -> None:
        self.calls = 0
        self._only_calls, self._held = only_calls, ""

    def feed(self, text: str, finished: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text and calls that are complete now; what may begin a call is held back.

        A call that the end of the answer cut is dropped.
        """
        self._held += text
        shown, calls = "", []
        while (start := self._held.find(TRIGGER)) >= 0:
            stop = self._held.find(END, start)
            if stop < 0:
                break
            shown += self._held[:start].rstrip()
            calls.append(self._call(self._held[start + len(TRIGGER) : stop]))
            self._held = self._held[stop + len(END) :]
        cut = len(self._held) - _possible_start(self._held)
        if finished and TRIGGER not in self._held:
            cut = len(self._held.rstrip() if self.calls else self._held)
        shown, self._held = shown + self._held[:cut], self._held[cut:]
        return "" if self._only_calls else shown, calls

    def _call(self, text: str) -> dict[str, Any]:
        """Arguments stay as written, even numbers too large to parse."""
        head, _, rest = text.partition(ARGUMENTS)
        self.calls += 1
        return {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": head.split('"')[3], "arguments": rest.rstrip()[:-1]},
        }


def _possible_start(text: str) -> int:
    """Number of last characters that may begin a call or come before one."""
    before, begun, _ = text.partition(TRIGGER)
    if not begun:
        starts = (TRIGGER[:n] for n in range(len(TRIGGER), 0, -1))
        before = text.removesuffix(next(filter(text.endswith, starts), ""))
    return len(text) - len(before.rstrip())


def _check(tools: list[Tool], limits: Limits) -> None:
    for tool in tools:
        check_schema(tool.function.parameters or ANYTHING, limits, "tools")
    names = [tool.function.name for tool in tools]
    if len({*names}) < len(names):
        raise APIError(400, "two tools have the same name", "tools")
