"""Structural tags, as vLLM and xgrammar write them, as grammars: what must follow certain texts."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from peagle.config import StructuredOutputs
from peagle.errors import InputError
from peagle.grammar import FORM, lark_rule
from peagle.schema import kept_form

REPEATS = {"optional": "?", "star": "*", "plus": "+"}
TEXTS = {"regex": "pattern", "grammar": "grammar"}
"""Formats that are forms of one text, and where it stands."""
ANY = {"type": "any_text"}
Format = Mapping[str, Any]


def lark_of(tag: Format, added: Mapping[str, int]) -> str:
    """A structural tag as a grammar in Lark's notation.

    added: ids of texts that are one token each, and no text to a grammar. Raises `InputError` for
    what is no such tag, or has a part that no grammar here keeps.
    """
    try:
        return _Grammar(added).whole(tag)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(
            f"{FORM} structural_tag lacks a field, or has a wrong one: {error}"
        ) from None


class _Grammar:
    """The rules of one grammar."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        self._known = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._rules: list[str] = []

    def whole(self, tag: Format) -> str:
        """The grammar of a tag in either of vLLM's forms."""
        if "structures" in tag:
            schemas = [one.get("schema") or True for one in tag["structures"]]
            contents = [{"type": "json_schema", "json_schema": schema} for schema in schemas]
            pairs = zip(tag["structures"], contents, strict=True)
            tags = [{**one, "content": content} for one, content in pairs]
            tag = {"format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}
        start = "TEXT" if tag["format"] == ANY else self._of(tag["format"])
        return "\n".join([f"start: {start}", *self._rules, "TEXT: /(?s:.*)/"])

    def _of(self, form: Format) -> str:
        """A format as the right side of a rule."""
        kind = form["type"]
        if form.get("excludes") or form.get("style", "json") != "json":
            kind = "unknown"
        match kind:
            case "const_string":
                return self._text(form["value"])
            case "json_schema":
                return lark_rule(kept_form(StructuredOutputs(json=json.dumps(form["json_schema"]))))
            case "regex" | "grammar":
                return lark_rule(StructuredOutputs(**{kind: form[TEXTS[kind]]}))
            case "sequence":
                return f"({' '.join(map(self._of, form['elements']))})"
            case "or":
                return _either(map(self._of, form["elements"]))
            case "tag":
                return f"({self._text(form['begin'])} {self._ended(form)})"
            case "triggered_tags":
                return self._triggered(form)
            case "tags_with_separator":
                return self._separated(form)
            case "optional" | "star" | "plus":
                return f"({self._of(form['content'])}){REPEATS[kind]}"
        told = json.dumps(form, default=str)[:80]
        raise InputError(f"{FORM} structural_tag cannot keep {told}, at least not in this place")

    def _ended(self, tag: Format) -> str:
        """A tag's content and its end."""
        content, end = tag["content"], tag["end"]
        ends = [end] if isinstance(end, str) else end
        if content == ANY and all(ends):
            return _either(map(self._until, ends))
        return f"{self._of(content)} {_either(map(self._text, ends))}"

    def _triggered(self, form: Format) -> str:
        """Text, in which every trigger begins one of the tags that begin with it."""
        begun = []
        for trigger in form["triggers"]:
            tags = [tag for tag in form["tags"] if trigger and tag["begin"].startswith(trigger)]
            rests = [(self._text(tag["begin"][len(trigger) :]), self._ended(tag)) for tag in tags]
            if not rests:
                raise InputError(f"{FORM} structural_tag: no tag begins with {trigger!r}")
            begun.append(f"{self._until(trigger)} {_either(map(' '.join, rests))}")
        some = "+" if form.get("at_least_one") else "*"
        if form.get("stop_after_first"):
            return _either(begun if form.get("at_least_one") else [*begun, "TEXT"])
        return f"{_either(begun)}{some} TEXT"

    def _separated(self, form: Format) -> str:
        """Tags and nothing else, with a separator between them."""
        tag = _either(self._of({"type": "tag", **one}) for one in form["tags"])
        more = "" if form.get("stop_after_first") else f" ({self._text(form['separator'])} {tag})*"
        return f"({tag}{more}){'' if form.get('at_least_one') else '?'}"

    def _until(self, end: str) -> str:
        """Any text up to the first place of another one, and that."""
        if known := self._known.match(end):  # which no text holds
            return f"TEXT {self._text(end[: known.end()])} {self._text(end[known.end() :])}"
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: TEXT {json.dumps(end)}")
        return name

    def _text(self, text: str) -> str:
        """A text, whose added tokens stand as their ids."""
        parts, place = [], 0
        for found in self._known.finditer(text):
            parts += [json.dumps(text[place : found.start()]), f"<[{self._added[found[0]]}]>"]
            place = found.end()
        return " ".join(part for part in [*parts, json.dumps(text[place:])] if part != '""')


def _either(parts: Iterable[str]) -> str:
    return f"({' | '.join(parts)})"
