"""JSON objects of many types, as clients of large APIs send them: what is unknown is left out."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pydantic import ConfigDict, Discriminator, field_validator

from peagle.server.protocol import Body

LONGEST_TOLD = 64
"""Characters of a client's word that an error or the log repeats."""
log = logging.getLogger("peagle.server")


class OpenBody(Body):
    """A JSON object whose unknown fields are left out."""

    model_config = ConfigDict(extra="ignore")


class Other(OpenBody):
    """An object of another type than those that are known; left out."""

    type: str

    @field_validator("type")
    @classmethod
    def _tell(cls, kind: str) -> str:
        _tell_once(kind[:LONGEST_TOLD])
        return kind


class NotText(OpenBody):
    """An image, or another thing that no text stands for."""

    type: str

    @field_validator("type")
    @classmethod
    def _refuse(cls, kind: str) -> str:
        raise ValueError(f"{kind[:LONGEST_TOLD]} is not supported; this model reads only text")


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


@lru_cache(1000)
def _tell_once(kind: str) -> None:
    log.warning(f"leaving out what is of type {kind!r}")
