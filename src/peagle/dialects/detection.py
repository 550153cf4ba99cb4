"""Which dialect a target writes: told by its tokenizer and chat template, or named."""

from collections.abc import Callable, Mapping
from typing import Any

from peagle.config import ChatConfig
from peagle.dialects.dialect import Dialect
from peagle.dialects.gemma4 import Gemma4Calls
from peagle.dialects.harmony import NEEDED, START, HarmonyDialect
from peagle.dialects.json_calls import HermesCalls, LlamaCalls
from peagle.dialects.markers import Markers
from peagle.dialects.pythonic import PythonicCalls
from peagle.dialects.qwen3_coder import Qwen3CoderCalls
from peagle.dialects.response_template import ResponseTemplateDialect
from peagle.dialects.section_dialect import SectionDialect
from peagle.dialects.sections import CallFormat, ReasoningFormat
from peagle.errors import InputError
from peagle.models.chat_template import hides_tools

HIDES_TOOLS = "but the chat template shows no tools"
HARMONY = ("openai", "openai_gptoss")
"""vLLM's names of the parsers of tool calls and of reasoning."""
THINK = ReasoningFormat("qwen3", "<think>", "</think>")
REASONING = {
    "qwen3": THINK,
    "deepseek_r1": ReasoningFormat("deepseek_r1", "<think>", "</think>", begun=True),
    "gemma4": ReasoningFormat("gemma4", "<|channel>", "<channel|>", heading="thought\n"),
}
CALLS: Mapping[str, Callable[[], CallFormat]] = {
    "hermes": HermesCalls,
    "qwen3_coder": Qwen3CoderCalls,
    "qwen3_xml": Qwen3CoderCalls,
    "llama3_json": LlamaCalls,
    "llama4_json": LlamaCalls,
    "pythonic": PythonicCalls,
    "llama4_pythonic": PythonicCalls,
    "gemma4": Gemma4Calls,
}
SIGNS = {
    "<|tool_call>": "gemma4",
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "dictionary of argument name": "llama3_json",
    "[func_name1(": "pythonic",
}
"""What a chat template tells the model about calls, the surest sign first."""


def find_dialect(tokenizer: Any, chat: ChatConfig) -> Dialect:
    """The dialect of a tokenizer and its chat template, or the one that is named.

    Raises `InputError` for a name that does not exist, or whose tokens the tokenizer lacks.
    """
    calls, reasoning = chat.tool_call_parser, chat.reasoning_parser
    _check("--tool-call-parser", calls, (*CALLS, HARMONY[0]))
    _check("--reasoning-parser", reasoning, (*REASONING, HARMONY[1]))
    text = chat.chat_template or _template(tokenizer)
    whole = not Markers.of(tokenizer, NEEDED).spelled
    if calls == HARMONY[0] or reasoning == HARMONY[1]:
        if not whole:
            raise InputError(
                f"the tokenizer lacks harmony's tokens ({', '.join(NEEDED)}); name another parser"
            )
        return HarmonyDialect(tokenizer)
    if whole and START in text and not (calls or reasoning):
        return HarmonyDialect(tokenizer)  # its own reader knows more than a template can say
    own = getattr(tokenizer, "response_template", None) and not (calls or reasoning)
    kind = ResponseTemplateDialect if own else SectionDialect
    thoughts = REASONING[reasoning] if reasoning else _reasoning(tokenizer, text)
    return kind(tokenizer, thoughts, CALLS[calls or _calls(text)]())


def told_dialect(dialect: Dialect, tokenizer: Any, chat: ChatConfig) -> str:
    """How answers are read, for people."""
    told = dialect.description
    return f"{told}; {HIDES_TOOLS}" if hides_tools(tokenizer, chat.chat_template) else told


def _check(flag: str, name: str | None, known: tuple[str, ...]) -> None:
    if name is not None and name not in known:
        raise InputError(f"{flag} {name}: there is no such parser; there are {', '.join(known)}")


def _template(tokenizer: Any) -> str:
    """All that a tokenizer's own chat templates say."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def _calls(template: str) -> str:
    """How a template says calls are written; Hermes's form where it says nothing."""
    return next((name for sign, name in SIGNS.items() if sign in template), "hermes")


def _reasoning(tokenizer: Any, template: str) -> ReasoningFormat | None:
    """The first format whose markers are tokens and named in the template."""
    for form in (REASONING["gemma4"], THINK):
        known = not Markers.of(tokenizer, (form.begin, form.end)).spelled
        if known and (form.begin in template or form.end in template):
            return form
    return None
