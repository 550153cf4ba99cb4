"""Dialect: how one model family writes an answer, in one tokenizer."""

from collections.abc import Sequence
from typing import Protocol

from peagle.dialects.markers import Markers
from peagle.dialects.parser import Parser
from peagle.dialects.tools import ToolUse
from peagle.token_rules import ThoughtSpan


class Dialect(Protocol):
    """How a model family writes thoughts and calls, and how it is kept to them."""

    @property
    def description(self) -> str:
        """The dialect in a few words, by vLLM's names of parsers."""

    def markers(self, use: ToolUse | None) -> Markers:
        """The markers of an answer; without `use` those of calls are ordinary tokens."""

    def ends(self, use: ToolUse | None) -> tuple[int, ...]:
        """Tokens that end an answer, whether or not the target's configuration lists them."""

    def thought_span(self, prompt: Sequence[int]) -> ThoughtSpan | None:
        """The tokens that begin and end the thoughts of an answer to a prompt; None where no single
        token does."""

    def parser(self, prompt: Sequence[int], use: ToolUse | None) -> Parser:
        """A parser of the answer to a rendered prompt, in the state that the prompt leaves."""

    def grammar(self, prompt: Sequence[int], use: ToolUse | None, form: str | None) -> str | None:
        """A Lark grammar of the answer to a prompt; None where anything may be said.

        form: the right side of a rule that the content must fit; with tools, it or calls.
        """


def needs_grammar(use: ToolUse | None, form: str | None) -> bool:
    """Whether a request binds its answer: models write calls in their own format without."""
    return form is not None or (
        use is not None and (use.required or any(tool.strict for tool in use.tools))
    )
