"""Dialects of sections: a format of thoughts, and one of calls."""

import json
from collections.abc import Sequence
from typing import Any

from peagle.dialects.dialect import needs_grammar
from peagle.dialects.markers import Markers
from peagle.dialects.parser import Parser
from peagle.dialects.sections import CallFormat, ReasoningFormat, Sections
from peagle.dialects.tools import ToolUse
from peagle.token_rules import ThoughtSpan

TURNS = ("<|im_start|>", "<|start_header_id|>", "<|turn>", "<start_of_turn>")
"""Tokens that begin a turn: an answer goes on from what stands after the prompt's last one."""
ANYTHING = "/(?s:.+)/"
MOST_SPACE = 8
"""Characters of white space before a call or a form: a model that knows no calls, and must write
one, would go on with white space to the end."""


class SectionDialect:
    """Thoughts between two markers, then content with calls among it."""

    def __init__(
        self, tokenizer: Any, reasoning: ReasoningFormat | None, calls: CallFormat
    ) -> None:
        self._tokenizer, self._reasoning, self._calls = tokenizer, reasoning, calls
        thoughts = (reasoning.begin, reasoning.end) if reasoning is not None else ()
        others = (calls.begin, calls.end, calls.also, *calls.inner)
        self._without_calls = Markers.of(tokenizer, thoughts)
        self._with_calls = Markers.of(tokenizer, (*thoughts, *filter(None, others)))
        self._turns = frozenset(Markers.of(tokenizer, TURNS).ids)
        self._handover = tuple(Markers.of(tokenizer, [calls.handover]).ids)

    @property
    def description(self) -> str:
        """Both formats' names."""
        reasoning = f"reasoning as {self._reasoning.name}" if self._reasoning else "no reasoning"
        return f"{reasoning}, tool calls as {self._calls.name}"

    def markers(self, use: ToolUse | None) -> Markers:
        """The markers of an answer."""
        return self._without_calls if use is None else self._with_calls

    def ends(self, use: ToolUse | None) -> tuple[int, ...]:
        """The token by which a model hands over to its tools."""
        return () if use is None else self._handover

    def thought_span(self, prompt: Sequence[int]) -> ThoughtSpan | None:
        """The tokens of both markers, where they are tokens."""
        ids, how = self._without_calls.ids, self._reasoning
        tokens = {marker: token for token, marker in ids.items()}
        if how is None or how.begin not in tokens or how.end not in tokens:
            return None
        within = self._thinks(prompt) is True
        return ThoughtSpan(tokens[how.begin], tokens[how.end], within)

    def parser(self, prompt: Sequence[int], use: ToolUse | None) -> Parser:
        """A parser in the state that the prompt leaves."""
        return Sections(self._reasoning, self._calls, use, thinking=self._thinks(prompt) is True)

    def grammar(self, prompt: Sequence[int], use: ToolUse | None, form: str | None) -> str | None:
        """Thoughts first, where the prompt has none; then calls, the form, or either."""
        if not needs_grammar(use, form):
            return None
        space = rf"WS: /[ \t\r\n]{{1,{MOST_SPACE}}}/"
        rules = [*self._thoughts(self._thinks(prompt)), f"ANYTHING: {ANYTHING}", space]
        parts = []
        if form is not None and not (use is not None and use.required):
            rules.append(f"form: {form}")
            parts.append("form")
        if use is not None:
            rules += self._calls_rules(use, free=not parts and not use.required)
            parts.append("calls")
        return "\n".join([*rules, f"answer: {' | '.join(parts)}"])

    def _thinks(self, prompt: Sequence[int]) -> bool | None:
        """Whether the prompt ends within thoughts, after them, or (None) before any."""
        if self._reasoning is None:
            return None
        ids, begun = self._without_calls.ids, self._reasoning.begun or None
        for token in reversed(prompt):
            if token in self._turns:
                return begun
            if token in ids:
                return ids[token] == self._reasoning.begin
        return begun

    def _thoughts(self, thinks: bool | None) -> list[str]:
        """The rule `start`, and what it takes to come to the rule `answer`."""
        if self._reasoning is None or thinks is False:
            return ["start: answer"]
        begin, end = map(self._without_calls.rule, (self._reasoning.begin, self._reasoning.end))
        if end.startswith('"'):  # spelled, so that any text would take it in
            thought = [f"thought[suffix={end}]: /(?s:.*)/"]
        else:
            thought = [f"thought: ANYTHING? {end}"]
        if thinks:
            return ["start: thought WS? answer", *thought]
        heading = f" {json.dumps(self._reasoning.heading)}" if self._reasoning.heading else ""
        return [f"start: ({begin}{heading} thought WS?)? answer", *thought]

    def _calls_rules(self, use: ToolUse, free: bool) -> list[str]:
        """The rule `calls`: calls only, or with `free` any text among them."""
        calls = self._calls
        marker = self._with_calls.rule(calls.begin)
        spelled = marker.startswith('"')
        opening = "opening" if free and spelled and not calls.bare else marker
        rules = calls.rules(use, self._with_calls, opening)
        several = use.most != 1 and calls.separator
        only = f"call ({calls.separator} call)*" if several else "call"
        if not free:
            return [*rules, f"calls: WS? {only}"]
        if calls.bare:
            return [*rules, f"calls: {only} | OTHER", f"OTHER: /[^{calls.bare}](?s:.*)/"]
        count = "*" if several else "?"
        if spelled:
            rules.append(f"opening[suffix={marker}]: /(?s:.*)/")
            return [*rules, f"calls: call{count} ANYTHING?"]
        return [*rules, f"calls: (ANYTHING? call){count} ANYTHING?"]
