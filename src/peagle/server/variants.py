"""JSON objects of many types, as the larger APIs have them: unknown ones are left out."""

from collections.abc import Collection
from typing import Any

from pydantic import BeforeValidator, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticOmit

from peagle.server.body import LONGEST_NAME, tell_once


def _of_known_type(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError as error:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or not any(map(_concerns_type, error.errors())):
            raise
        tell_once(f"leaving out what is of type {kind[:LONGEST_NAME]!r}")
        raise PydanticOmit from None


def _concerns_type(error: Any) -> bool:
    """Whether an error is about an object's own `type`, rather than about that of a part of it."""
    kinds = {(): "union_tag_invalid", ("type",): "literal_error"}
    return bool(kinds.get(error["loc"]) == error["type"])


KNOWN_TYPE = WrapValidator(_of_known_type)
"""Leaves an object out of its list, such as a server's own search, if its `type` is none of those
that its model or one of its models names."""


def usual_type(name: str) -> BeforeValidator:
    """Names the type of an object that names none."""

    def named(value: Any) -> Any:
        unnamed = isinstance(value, dict) and value.get("type") is None
        return {**value, "type": name} if unnamed else value

    return BeforeValidator(named)


def result_part(part: Any, known: Collection[str]) -> Any:
    """A part of a tool's result; in place of one of no known type, such as a picture, a text.

    It is not refused: the client would send it again with each later request.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind in known:
        return part
    told = f"[{kind[:LONGEST_NAME]} left out: this model reads only text]"
    tell_once(told)
    return {"type": "text", "text": told}
