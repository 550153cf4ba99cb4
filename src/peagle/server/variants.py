"""JSON objects of many types, as the larger APIs have them: unknown ones are left out."""

from collections.abc import Collection, Sequence
from typing import Any

from pydantic import ConfigDict, Discriminator, field_validator

from peagle.server.body import LONGEST_NAME, Body, tell_once


class Other(Body):
    """An object of another type than those that are known; left out."""

    model_config = ConfigDict(extra="ignore")
    type: str

    @field_validator("type")
    @classmethod
    def _tell(cls, kind: str) -> str:
        tell_once(f"leaving out what is of type {kind[:LONGEST_NAME]!r}")
        return kind


class NotText(Body):
    """An image, or another thing that no text stands for."""

    model_config = ConfigDict(extra="ignore")
    type: str

    @field_validator("type")
    @classmethod
    def _refuse(cls, kind: str) -> str:
        raise ValueError(f"{kind[:LONGEST_NAME]} is not supported; this model reads only text")


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


def by_type(known: Sequence[str], usual: str | None = None) -> Discriminator:
    """Chooses among tagged models by an object's `type`: one of the known, or "other".

    usual: the type of an object that does not name one.
    """

    def tag(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if not isinstance(kind, str):
            return usual if kind is None else None
        return kind if kind in known else "other"

    return Discriminator(tag)
