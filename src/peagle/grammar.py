"""Structured output: a JSON schema, regex, choice or grammar as a constraint on tokens.

The grammars are llguidance's; it comes with the extra `structured`.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from peagle.config import StructuredOutputs
from peagle.errors import InputError, lacking

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

KEPT = 64
"""Compiled grammars that are kept."""
STEP_ITEMS = 5000
"""Most parser items per token: a grammar that takes more would keep all other requests waiting."""
LEXER_FUEL = 200_000
"""A fifth of llguidance's default, which nested repeats use up in a second and 250 MB; schemas of
64 KiB with hundreds of patterns and formats get by with it."""


UNFIT = {"NoExtensionBias": "no text fits"}
"""llguidance's word for it, in ours."""
FORM = "structured outputs:"
"""How it is told that a request's form is at fault."""
GBNF = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)
"""A rule as only GBNF writes it."""
UNESCAPED = re.compile(r"\\.|/", re.DOTALL)
"""A slash, or an escaped character, which may be one."""
STRUCTURE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*(?:\]|\Z)|[()|]", re.DOTALL)
"""What a regex may have a bar in, what groups it, and a bar."""
ENDS = re.compile(r"(?:[^\\]|\\.)*\$", re.DOTALL)
"""A regex whose last letter stands for the end."""
QUOTED = re.compile(r'"(?:[^"\\\n]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"')
"""A literal of a Lark grammar."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Raises `InputError` where the block's import finds no llguidance."""
    try:
        yield
    except ModuleNotFoundError:
        raise InputError(lacking("structured outputs need llguidance", "structured")) from None


def refuse_added_tokens(wanted: StructuredOutputs, added: Iterable[str]) -> None:
    """Raise `InputError` for a form with a text that the tokenizer has as an added token.

    Such a token is no text to a grammar, and the model would write nothing else for that text.
    """
    for text in _literals(wanted):
        for token in added:
            if token in text:
                raise InputError(
                    f"structured outputs: {token!r} is a token of its own in this model, which "
                    f"no text can hold; in a grammar write {token} without quotes"
                )


def complaint_about(schema: str | dict[str, Any]) -> str | None:
    """Why a JSON schema, or its text, cannot be compiled, whatever the tokenizer; None if it can.

    Raises `InputError` without the extra `structured`.
    """
    with importing():
        from llguidance import LLMatcher
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema)
    except ValueError as error:
        return str(error)
    wrong, told = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    return told[0] if wrong else None


def try_form(form: str) -> None:
    """Compile a form that `written` wrote, whatever the tokenizer, and forget it.

    Within a sandbox, what takes too long or too much memory is refused; what else is wrong with it,
    its compiler says.
    """
    with importing():
        from llguidance import LLMatcher
    with contextlib.suppress(ValueError):
        grammar = source_of(read(form))
        LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())


def whole_pattern(pattern: str) -> str | None:
    """A JSON schema's pattern, which need not fit from the beginning to the end, as one that must.

    None for one that no grammar can keep. Raises `InputError` without the extra `structured`.
    """
    with importing():
        from llguidance import LLMatcher, regex_to_lark
    either = "|".join(map(_whole_text, _alternatives(pattern)))
    found = f"/{regex_to_lark(either, 'dw')}/"
    wrong = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: T\nT: {found}"))
    return None if wrong else found


def _alternatives(pattern: str) -> Iterator[str]:
    """The alternatives of a regex, but for those within its groups."""
    depth = start = 0
    for part in STRUCTURE.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if part[0] == "|" and not depth:
            yield pattern[start : part.start()]
            start = part.end()
    yield pattern[start:]


def _whole_text(pattern: str) -> str:
    """A regex that finds one, as a regex of the whole text."""
    head, tail = pattern.startswith("^"), ENDS.fullmatch(pattern) is not None
    core = pattern[int(head) : len(pattern) - int(tail)]
    anything = "(?s:.*)"
    return f"{'' if head else anything}(?:{core}){'' if tail else anything}"


def limits() -> "LLParserLimits":
    """What llguidance may use for one grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(step_max_items=STEP_ITEMS, initial_lexer_fuel=LEXER_FUEL)


def _literals(wanted: StructuredOutputs) -> Iterator[str]:
    """The texts that a form names."""
    if wanted.json_schema is not None:
        yield from _named(wanted.json_schema)
    yield from wanted.choice or ()
    if wanted.regex is not None:
        yield wanted.regex
    if wanted.grammar is not None:
        quoted = QUOTED.findall(wanted.grammar)
        yield from (json.loads(text, strict=False) for text in quoted)  # tabs may stand in them


def _named(schema: Any) -> Iterator[str]:
    """Names of properties, and values of `const` and `enum`, of a JSON schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from _named(item)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("const", "enum"):
            yield json.dumps(value, ensure_ascii=False)
        elif key == "properties" and isinstance(value, dict):
            yield from value
            yield from _named([*value.values()])
        else:
            yield from _named(value)


def complaint_of(matcher: "LLMatcher") -> str:
    """What is wrong with a grammar, without the drawings of where."""
    told, *more = matcher.get_error().strip().splitlines()
    reasons = (line.removeprefix("error: ") for line in more if line.startswith("error: "))
    return " ".join([FORM, UNFIT.get(told, told), *reasons])


def written(wanted: StructuredOutputs) -> str:
    """The source of a grammar. In ASCII, since a schema may hold halves of surrogate pairs."""
    return json.dumps(wanted.model_dump(exclude_defaults=True))


def read(grammar: str) -> StructuredOutputs:
    """The form that `written` wrote."""
    return StructuredOutputs(**json.loads(grammar))


def lark_rule(wanted: StructuredOutputs) -> str:
    """The form as the right side of a rule in Lark's notation."""
    if wanted.json_object:
        return '%json {"type": "object"}'
    if wanted.json_schema is not None:
        return f"%json {json.dumps(wanted.json_schema)}"
    if wanted.regex is not None:
        return f"/{UNESCAPED.sub(_escaped, wanted.regex)}/"
    if wanted.choice is not None:
        return " | ".join(json.dumps(text) for text in wanted.choice)
    return f"%lark {{\n{_lark(wanted.grammar or '')}\n}}"


def _escaped(found: re.Match[str]) -> str:
    return r"\/" if found[0] == "/" else found[0]


def source_of(wanted: StructuredOutputs) -> str:
    """The form in llguidance's notation. Raises `InputError` or `ValueError` for a wrong one."""
    from llguidance import LLMatcher

    lark = f"start: {lark_rule(wanted)}" if wanted.grammar is None else _lark(wanted.grammar)
    return LLMatcher.grammar_from_lark(lark)


def _lark(grammar: str) -> str:
    """A grammar in Lark's notation; those in vLLM's and SGLang's examples are in GBNF."""
    if not GBNF.search(grammar):
        return grammar
    with importing():
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
    try:
        return gbnf_to_lark(grammar)
    except (IndexError, ValueError):  # what it meets where a text or a class has no end
        raise InputError("not a grammar in GBNF: a text, a class or a count is wrong") from None
    except (GbnfToLarkError, RecursionError) as error:
        raise InputError(f"not a grammar in GBNF: {error}") from None
