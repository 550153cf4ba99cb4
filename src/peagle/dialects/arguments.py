"""Arguments of calls as models write them -> JSON, with values of the types that schemas name.

Models write Python's words and quotes, bare words, line ends and quotes within strings, a comma too
many or a bracket too few. What is JSON is handed on as it stands.
"""

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from peagle.dialects.argument_schema import ANYTHING, ArgumentSchema

QUOTE_TOKEN = "\udcff"
"""Stands for a token that quotes, where a dialect has one: no text holds this letter."""
QUOTES = f"\"'{QUOTE_TOKEN}"
SPACE = " \t\r\n"
SPACES = re.compile(f"[{SPACE}]*")
KEY = rf"[^{SPACE}{{}}\[\],:{QUOTES}]"
KEY_END = re.compile(rf"[{SPACE}{{}}\[\],:{QUOTES}]")
WORD_END = re.compile(rf"[{{}}\[\],{QUOTE_TOKEN}]")
NEXT_KEY = re.compile(rf",[{SPACE}]*(?:[}}{QUOTES}]|{KEY}{{1,64}}[{SPACE}]*:)")
BEGUN_KEY = re.compile(rf",[{SPACE}]*(?:{KEY}{{1,64}}[{SPACE}]*)?\Z")
"""What follows an object's value, and what may become so with more text."""
HEX = "[0-9a-fA-F]"
HIGH, LOW = rf"\\u[dD][89abAB]{HEX}{{2}}", rf"\\u[dD][c-fC-F]{HEX}{{2}}"
"""Halves of a character."""
BEGUN_LOW = rf"(?:\\(?:u(?:[dD](?:[c-fC-F]{HEX}?)?)?)?)?\Z"
ESCAPE = (
    rf"\\(?:[^u]|u(?![dD][89a-fA-F]){HEX}{{4}}|u(?!{HEX}{{4}}|{HEX}{{0,3}}\Z))"
    rf"|{HIGH}{LOW}|{LOW}|{HIGH}(?!{LOW}|{BEGUN_LOW})"
)
"""An escaped character, even if JSON has none such, or a half of one that stands alone."""
CHARACTERS = {
    **{quote: re.compile(rf"(?:[^\\{quote}]|{ESCAPE})*", re.DOTALL) for quote in "\"'"},
    QUOTE_TOKEN: re.compile(f"[^{QUOTE_TOKEN}]*"),
}
"""Whole characters of a string, by what quotes it."""
ODD = re.compile(rf'{HIGH}{LOW}|\\(u{HEX}{{4}}|.)|[\x00-\x1f"]', re.DOTALL)
"""Characters that JSON may not have as they stand."""
KNOWN_ESCAPE = re.compile(rf'["\\/bfnrt]|u(?![dD][89a-fA-F]){HEX}{{4}}')
CONSTANTS = {word: word for word in ("true", "false", "null")}
CONSTANTS |= {"True": "true", "False": "false", "None": "null", "Null": "null"}
JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
NUMERAL = re.compile(r"[-+]?(?:0[xXoObB][\da-fA-F_]+|\.?\d[\d_.eE+-]*)", re.ASCII)
OTHER_THAN_TEXT: Mapping[str, str] = {
    "null": "(?i:null|none)",
    "boolean": "(?i:true|false)",
    "integer": NUMERAL.pattern,
    "object": r"(?s:\{.*)",
    "array": r"(?s:\[.*)",
}
"""Texts that `typed` may take for a value of a type, though a string is as good."""
LONGEST = 400
"""Most characters of a number."""
BEGUN_WORD = re.compile(rf"[{SPACE}]*(?:[a-zA-Z]{{0,5}}|[-+.\d][\w.+-]*)[{SPACE}]*", re.ASCII)
"""What may become a constant or a number with more text."""
ANSWER = "<answer>"
"""The file that Python's parser takes an answer for."""

warnings.filterwarnings("ignore", module=re.escape(ANSWER))  # such as of `"\d"`


@dataclass
class Bracket:
    """An object or a list that is open."""

    closer: str
    schema: ArgumentSchema
    awaits: Literal["key", "colon", "value", "comma"]
    key: str = ""
    place: int = 0

    @property
    def takes_key(self) -> bool:
        """Whether a key comes next, perhaps after a comma that the model left out."""
        return self.closer == "}" and self.awaits in ("key", "comma")

    def go_on(self) -> None:
        """Expect something after a comma."""
        self.awaits = "key" if self.closer == "}" else "value"

    def take(self) -> ArgumentSchema:
        """Take a value; returns its schema."""
        place, self.place, self.awaits = self.place, self.place + 1, "comma"
        return self.schema.value(self.key) if self.closer == "}" else self.schema.item(place)

    def lack(self) -> str:
        """What is missing of a key's value."""
        return {"colon": ":null", "value": "null"}.get(self.awaits, "") * (self.closer == "}")


class ArgumentsWriter:
    """Writes an object as JSON while a model writes it.

    A quote ends a string only before what may follow one; otherwise it is text of the string.
    """

    def __init__(self, schema: ArgumentSchema) -> None:
        self._schema = schema
        self._open: list[Bracket] = []
        self._closers = {"}": 0, "]": 0}
        """How many brackets of each kind are open."""
        self._comma = ""
        """A comma and white space that are left out if nothing follows."""
        self._quote = ""
        """What closes the string that is open."""
        self._string: str | None = None
        """The open string, if it is a key, or is held since another type is wanted."""
        self._wanted: ArgumentSchema | None = None
        """The open string's schema; None for a key."""
        self._at = self._seen = 0
        """Place in what is held, and how many characters from there have no end among them."""
        self.held = ""
        """What is not written yet; once the object is complete, what follows it."""
        self.complete = False

    @property
    def quoted(self) -> bool:
        """Whether a string is open, so that whatever comes is text."""
        return bool(self._quote) and not self.held.startswith(self._quote)

    def feed(self, text: str) -> str:
        """What more text makes certain."""
        self.held += text
        return self._write(final=False)

    def finish(self) -> str:
        """The rest, with the brackets that are missing; not complete within a string."""
        written = self._write(final=True)
        while self._open and not self._quote:
            written += self._close(self._open[-1].closer)
        return written

    def _write(self, final: bool) -> str:
        written = []
        while not self.complete and (step := self._step(final)) is not None:
            written.append(step)
            self._seen = 0
        self.held, self._at = self.held[self._at :], 0
        return "".join(written)

    def _step(self, final: bool) -> str | None:
        """The next of what is held, as JSON; None: more has to come."""
        if self._quote:
            return self._go_on(final)
        letter = self.held[self._at : self._at + 1]
        if not letter:
            return None
        if letter in SPACE:
            return self._space()
        if letter not in "{}[],:" and self._open:
            return self._begin_string(letter) if letter in QUOTES else self._word(final)
        self._at += 1
        if letter in "{[":
            return self._begin(letter)
        if letter in "}]":
            return self._close(letter)
        return self._punctuate(letter) if self._open else ""

    def _space(self) -> str:
        found = SPACES.match(self.held, self._at)
        assert found is not None
        self._at = found.end()
        if self._comma:
            self._comma += found[0]
        return "" if self._comma or not self._open else found[0]

    def _separate(self, top: Bracket) -> str:
        """What has to stand before a key or a value."""
        colon = ":" * (top.awaits == "colon")
        if top.awaits == "comma":  # the model left it out
            self._comma = ","
            top.go_on()
        comma, self._comma = self._comma, ""
        return comma + colon

    def _punctuate(self, letter: str) -> str:
        """Go on by a comma or a colon; one too many is left out."""
        top = self._open[-1]
        if letter == ":":
            after, top.awaits = top.awaits, "value" if top.awaits == "colon" else top.awaits
            return ":" * (after == "colon")
        lack = top.lack()
        if lack or top.awaits == "comma":
            self._comma = ","
            top.go_on()
        return lack

    def _begin(self, letter: str) -> str:
        schema, before, closer = self._schema, "", {"{": "}", "[": "]"}[letter]
        if self._open:
            top = self._open[-1]
            if top.takes_key:  # no key begins so
                return ""
            before, schema = self._separate(top), top.take()
        self._open.append(Bracket(closer, schema, "value"))
        self._open[-1].go_on()
        self._closers[closer] += 1
        return before + letter

    def _close(self, closer: str) -> str:
        """Close the innermost bracket of a kind, and those within it."""
        if not self._closers[closer]:  # there is nothing to close
            return ""
        written, self._comma = self._comma[1:], ""
        found = ""
        while found != closer:
            top = self._open.pop()
            found = top.closer
            self._closers[found] -= 1
            written += top.lack() + found
        self.complete = not self._open
        return written

    def _word(self, final: bool) -> str | None:
        """A key without quotes, or a value."""
        top = self._open[-1]
        is_key = top.takes_key
        end = (KEY_END if is_key else WORD_END).search(self.held, self._at + self._seen)
        if end is None and not final:
            self._seen = len(self.held) - self._at
            return None
        word = self.held[self._at : end.start() if end else None].rstrip(SPACE)
        self._at += len(word)
        before = self._separate(top)
        if is_key:
            top.key, top.awaits = word, "colon"
            return before + _dumps(word)
        schema = top.take()
        return before + (CONSTANTS.get(word) or typed(word, schema))

    def _begin_string(self, quote: str) -> str:
        top = self._open[-1]
        is_key = top.takes_key
        before, self._quote = self._separate(top), quote
        self._wanted = None if is_key else top.take()
        if is_key:
            top.awaits = "colon"
        shown = self._wanted is None or "string" in self._wanted.types
        self._string = "" if is_key or not shown else None
        self._at += 1
        return before + '"' * shown

    def _go_on(self, final: bool) -> str | None:
        """More of the string that is open, and perhaps its end."""
        found = CHARACTERS[self._quote].match(self.held, self._at)
        assert found is not None  # perhaps of nothing
        end, text = found.end(), found[0]
        if self._quote == QUOTE_TOKEN:
            said = within_quotes(text)
        else:
            said = ODD.sub(_mended, text.replace(QUOTE_TOKEN, '"'))
        closes = self._closes(end + 1, final) if self.held.startswith(self._quote, end) else None
        if closes is None and not text:
            return None
        self._at = end + (closes is not None)
        if closes is False:
            said += '\\"'
        if self._string is not None:
            self._string += said
        shown = said * (self._string is None or self._wanted is None)
        return shown + self._end_string() if closes else shown

    def _closes(self, place: int, final: bool) -> bool | None:
        """Whether the quote before `place` closes its string; None: more has to come."""
        space = SPACES.match(self.held, max(place, self._at + self._seen))
        assert space is not None
        after = space.end()
        self._seen = after - self._at  # not to be searched again
        letter = self.held[after : after + 1]
        if not letter:
            return True if final else None
        if self._wanted is None:
            return letter in ":,}"  # after a key
        if letter != "," or self._open[-1].closer == "]":
            return letter in ",}]"
        if NEXT_KEY.match(self.held, after):
            return True
        return None if BEGUN_KEY.match(self.held, after) and not final else False

    def _end_string(self) -> str:
        self._quote, string, self._string = "", self._string, None
        if string is None:
            return '"'
        text = json.loads(f'"{string}"')  # it was made so that JSON reads it
        if self._wanted is not None:
            return _fitted(text, self._wanted) or _dumps(text)
        self._open[-1].key = text
        return '"'


def typed(text: str, schema: ArgumentSchema) -> str:
    """A value without quotes, as JSON: a string only where nothing else fits."""
    if schema.types == {"string"}:
        return _dumps(text)
    found = _fitted(text, schema)
    if found is None and "string" not in schema.types:
        found = _fitted(text, ANYTHING)
    return found or _dumps(text)


def is_text(begun: str, schema: ArgumentSchema) -> bool | None:
    """Whether a value without quotes that begins so is a string; None: that is not to be known."""
    types = schema.types
    if "string" not in types or types == {"string"}:
        return "string" in types
    if begun.lstrip(SPACE)[:1] in ("{", "["):
        return False
    return None if len(begun) <= LONGEST and BEGUN_WORD.fullmatch(begun) else True


def as_arguments(text: str, schema: ArgumentSchema) -> str | None:
    """All arguments of a call as JSON; None where they are none.

    Nothing at all is an object without values; what is no object may be the only argument.
    """
    if text.strip(SPACE)[:1] == "{":
        return _written(text, schema)
    if text.strip(SPACE) in ("", "null", "None"):
        return "{}"
    names = [*schema.names]
    if len(names) != 1 or "string" not in schema.value(names[0]).types:
        return None
    return json.dumps({names[0]: text}, ensure_ascii=False)


def _written(text: str, schema: ArgumentSchema) -> str | None:
    """An object or a list as JSON; None for one that does not end, or is followed by more."""
    writer = ArgumentsWriter(schema)
    written = writer.feed(text) + writer.finish()
    return written if writer.complete and not writer.held.strip(SPACE) else None


def _fitted(text: str, schema: ArgumentSchema) -> str | None:
    """A text as JSON of a type that a schema names, other than a string; None if it is of none."""
    types = schema.types
    word = text if "string" in types else text.strip(SPACE)
    constant = CONSTANTS.get(word.title())  # some write TRUE
    if constant is not None and ("null" if constant == "null" else "boolean") in types:
        return constant
    kind = {"{": "object", "[": "array"}.get(word[:1])
    if kind in types and ("string" not in types or _literal(word) is not None):
        return _written(word, schema)
    if word[:1] in ("'", '"') and "string" not in types and isinstance(_literal(word), str):
        return _fitted(_literal(word), schema)
    return _number(word, types) if "integer" in types else None


def _number(word: str, types: frozenset[str]) -> str | None:
    """A number as JSON, also as Python writes it; whole, where only such are wanted."""
    if len(word) > LONGEST or not NUMERAL.fullmatch(word):
        return None
    value = _literal(word)
    if not isinstance(value, int | float) or (isinstance(value, float) and not isfinite(value)):
        return None
    if isinstance(value, float) and "number" not in types:
        return str(int(value)) if value.is_integer() else None
    return word if JSON_NUMBER.fullmatch(word) else json.dumps(value)


def _literal(text: str) -> Any:
    """The value of JSON, or of a literal of Python's; None for neither."""
    for read in (json.loads, _python):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return read(text)
    return None


def _python(text: str) -> Any:
    return ast.literal_eval(ast.parse(text, ANSWER, "eval"))


def _mended(found: re.Match[str]) -> str:
    """A character that JSON may not have as it stands, as JSON."""
    text, escaped = found[0], found[1]
    if text[0] != "\\":
        return within_quotes(text)
    if escaped is None or KNOWN_ESCAPE.fullmatch(escaped):
        return text
    if escaped[0] == "u" and len(escaped) > 1:
        return "\ufffd"  # half a character
    return ("" if escaped == "'" else "\\\\") + within_quotes(escaped)


def within_quotes(text: str) -> str:
    """A text as it stands within a string of JSON."""
    return _dumps(text)[1:-1]


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
