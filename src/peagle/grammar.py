"""Structured output: a JSON schema, regex, choice or grammar as a constraint on tokens.

The grammars are llguidance's; it comes with the extra `structured`.
"""

import contextlib
import functools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from peagle.config import StructuredOutputs
from peagle.errors import InputError, lacking

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")
STACK = 1 << 30
"""Bytes of stack, of which only those used are allocated: rules are compiled recursively, each
within the one that names it, and a request may bring thousands."""
SIZING_STACKS = threading.Lock()
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
NO_TOKEN = f"{FORM} what has to come next is no token of the target"
GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
"""A rule as only GBNF writes it."""
UNESCAPED = re.compile(r"\\.|/", re.DOTALL)
"""A slash, or an escaped character, which may be one."""
STRUCTURE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
"""What a regex may have a bar in, what groups it, and a bar."""
ENDS = re.compile(r"(?:[^\\]|\\.)*\$", re.DOTALL)
"""A regex whose last letter stands for the end."""
QUOTED = re.compile(r'"(?:[^"\\\n]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"')
"""A literal of a Lark grammar."""


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Raises `InputError` where the block's import finds no llguidance."""
    try:
        yield
    except ModuleNotFoundError:
        raise InputError(lacking("structured outputs need llguidance", "structured")) from None


class GrammarCompiler:
    """Compiles grammars for one tokenizer; safe to call from several threads."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]) -> None:
        with _importing():
            import llguidance.hf
        if not end_tokens:
            raise InputError("structured outputs need a target that names its end of text")
        ends, size = list(end_tokens), max(vocab_size, len(tokenizer))
        self._vocab_size = vocab_size
        try:
            self._tokenizer: LLTokenizer = llguidance.hf.from_tokenizer(tokenizer, size, ends)
        except ValueError as error:
            raise InputError(f"structured outputs: not with this tokenizer: {error}") from None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._keeping = threading.Lock()

    def compile(self, wanted: StructuredOutputs) -> "GrammarConstraint":
        """Make the constraint of one sequence. Raises `InputError` for a grammar that is wrong,
        unsupported or too complex, or that no text fits.

        The latest `KEPT` are compiled once: an agent sends the same tools at every turn. They are
        told apart by their JSON, since to Python `true` equals 1, and properties have no order.
        """
        written = wanted.model_dump_json()
        with self._keeping:
            matcher = self._kept.pop(written, None)
        if matcher is None:
            matcher = self._compiled(wanted)
        with self._keeping:
            self._kept[written] = matcher
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return GrammarConstraint(matcher, self._vocab_size)

    def _compiled(self, wanted: StructuredOutputs) -> "LLMatcher":
        try:
            matcher = on_large_stack(lambda: self._matcher(wanted))
        except ValueError as error:
            raise InputError(f"structured outputs: {error}") from None
        if matcher.is_error():
            raise InputError(_complaint(matcher))
        return matcher

    def _matcher(self, wanted: StructuredOutputs) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, _grammar(wanted), log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds out whether any text fits
        return matcher


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


def complaint_about(schema: dict[str, Any]) -> str | None:
    """Why a JSON schema cannot be compiled, whatever the tokenizer; None if it can.

    Raises `InputError` without the extra `structured`.
    """
    with _importing():
        from llguidance import LLMatcher
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema)
    except ValueError as error:
        return str(error)
    wrong, told = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    return told[0] if wrong else None


@functools.lru_cache(KEPT)
def lark_pattern(pattern: str) -> str | None:
    """A JSON schema's pattern, which need not fit from the beginning to the end, as one that must.

    None for one that no grammar can keep. Raises `InputError` without the extra `structured`.
    """
    with _importing():
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


def _limits() -> "LLParserLimits":
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


def _complaint(matcher: "LLMatcher") -> str:
    """What is wrong with a grammar, without the drawings of where."""
    told, *more = matcher.get_error().strip().splitlines()
    reasons = (line.removeprefix("error: ") for line in more if line.startswith("error: "))
    return " ".join([FORM, UNFIT.get(told, told), *reasons])


def on_large_stack(work: Callable[[], T]) -> T:
    """Run some work on a thread with a large stack; returns or raises what the work does."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with SIZING_STACKS:
        before = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="peagle-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


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


def _grammar(wanted: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if wanted.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"})
    if wanted.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(wanted.json_schema)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_lark(f"start: {lark_rule(wanted)}")
    return LLMatcher.grammar_from_lark(_lark(wanted.grammar or ""))


def _lark(grammar: str) -> str:
    """A grammar in Lark's notation; those in vLLM's and SGLang's examples are in GBNF."""
    if not GBNF.search(grammar):
        return grammar
    with _importing():
        from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
    try:
        return gbnf_to_lark(grammar)
    except IndexError:  # what it meets where a text or a class of characters has no end
        raise InputError("not a grammar in GBNF: it ends within a text or a class") from None
    except (GbnfToLarkError, RecursionError) as error:
        raise InputError(f"not a grammar in GBNF: {error}") from None


class GrammarConstraint:
    """One request's place in its grammar."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._unused, self._vocab_size = matcher, vocab_size
        self._bytes = -(-vocab_size // 8)
        self._matcher = matcher.deep_copy()
        self._taken: list[int] = []
        self._masked, self._fault = 0, ""
        """How many of the next tokens are chosen under a mask, and why no more are."""
        self.failure: str | None = None
        """Why the grammar failed: it may turn out too complex only as the output grows."""

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """The grammar's masks along the drafts, as far as it follows them: [K + 1, bytes] uint8.

        Where it is too complex, any token is allowed: a request that takes one there has failed.
        """
        masks, fault = self._masks(drafts)
        self._masked = len(drafts) + 1
        if fault is not None:
            self._masked, self._fault = len(masks), fault
            self._go_back()
        else:
            self._matcher.rollback(len(masks) - 1)
        anything = torch.full((self._bytes,), 255, dtype=torch.uint8)
        return torch.stack(masks + [anything] * (len(drafts) + 1 - len(masks)))

    def advance(self, tokens: Sequence[int]) -> None:
        """Move on by the chosen tokens; an end of text after a complete form is not part of it."""
        if len(tokens) > self._masked:
            self.failure = self._fault
            return
        self._taken += tokens
        self._take(tokens)

    def _masks(self, drafts: Sequence[int]) -> tuple[list[Tensor], str | None]:
        """The masks that can be computed, and why the next one cannot.

        The matcher consumes drafts up to the last mask.
        """
        masks: list[Tensor] = []
        for draft in (*drafts, None):
            mask = self._mask()
            if self._matcher.is_error():
                return masks, _complaint(self._matcher)
            if not mask.any():
                return masks, NO_TOKEN
            masks.append(mask)
            if draft is None or self._matcher.is_stopped():
                break
            if not self._matcher.try_consume_tokens([draft]):
                break
        return masks, None

    def _mask(self) -> Tensor:
        """Tokens allowed next, a bit each: [bytes] uint8. A tokenizer may have more."""
        mask = bytearray(self._matcher.compute_bitmask()[: self._bytes])
        mask[-1] &= 0xFF >> (-self._vocab_size % 8)
        return torch.frombuffer(mask, dtype=torch.uint8)

    def _go_back(self) -> None:
        """Return to the end of the output: after an error, even among drafts, rollback fails."""
        self._matcher = self._unused.deep_copy()
        self._take(self._taken)

    def _take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
