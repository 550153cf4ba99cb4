"""JSON objects in requests: strict about the fields they know, lenient about all others."""

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MOST_TOLD = 1000
"""Lines of the log about what is left out."""
MOST_UNKNOWN = 256
"""Unknown fields of one object that are looked at."""
LONGEST_NAME = 64
"""Characters of an unknown field's name that are looked at."""
LENGTHS = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens"),
    *("max_new_tokens", "n_predict", "num_predict"),
)
"""What APIs call the most tokens of an answer, which would have no end if that were missed."""
IGNORED = frozenset(Path(__file__).with_name("ignored_fields.txt").read_text().split())
"""Fields that clients are known to send, wherever they are none of ours: the log does not name
them."""
SHORTEST_TYPED = 6
"""Characters of a name in which one wrong letter is a slip and not another name."""
log = logging.getLogger("peagle.server")
_told: set[str] = set()


class Body(BaseModel):
    """A JSON object without silent conversions.

    Clients send fields of many servers, so unknown ones are left out, and the log names each once,
    but for those in `IGNORED`. What looks like a misspelled field of ours is refused: it would be
    missed silently.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="after")
    def _leave_out_unknown(self) -> Self:
        unknown = self.__pydantic_extra__
        if unknown:
            for number, (name, value) in enumerate(unknown.items()):
                if value is not None:
                    self._refuse_missed_length(name, value)
                    if number < MOST_UNKNOWN and name not in IGNORED:
                        _meet(type(self), name)
            unknown.clear()
        return self

    def _refuse_missed_length(self, name: str, value: Any) -> None:
        """Raise for another API's name for the length of an answer, where ours is not given."""
        if name not in LENGTHS or not isinstance(value, int) or value < 1:
            return
        ours = [one for one in LENGTHS if one in type(self).model_fields]
        if ours and not any(getattr(self, one) for one in ours):
            raise _near_miss(name, ours[0])


def _whole(value: Any) -> Any:
    """5.0 as 5: some languages write every number with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def refused(why: str) -> AfterValidator:
    """Raises for a field that asks for something, rather than for nothing."""

    def refuse(value: Any) -> Any:
        if value:
            raise PydanticCustomError("unsupported", why)
        return value

    return AfterValidator(refuse)


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item is reported, not each of a million."""
Whole = BeforeValidator(_whole)
Integer = Annotated[int, Whole]
Count = Annotated[int, Field(ge=0), Whole]
Positive = Annotated[int, Field(ge=1), Whole]
Refused = Annotated[
    Any, refused("not supported; leave it out"), Field(description="Not supported.")
]
"""What would change the answer."""


def tell_once(line: str) -> None:
    """Log what is left out of requests, each thing once; the first `MOST_TOLD` of them."""
    if line not in _told and len(_told) < MOST_TOLD:
        _told.add(line)
        log.warning(line)


def _meet(kind: type[Body], name: str) -> None:
    """Log an unknown field once. Raises for one that looks like a misspelled one of ours."""
    line = f"{kind.__name__}: ignoring the unknown field {name[:LONGEST_NAME]!r}"
    if line in _told:
        return
    near = near_miss(kind, name)
    if near is not None:
        raise _near_miss(name, near)
    tell_once(line)


def _near_miss(name: str, near: str) -> PydanticCustomError:
    told = "no such field; did you mean {near}?"
    return PydanticCustomError("near_miss", told, {"key": name, "near": near})


def near_miss(kind: type[Body], name: str) -> str | None:
    """The field that a name may be meant for: other capitals or dashes, or one wrong letter."""
    if len(name) > LONGEST_NAME:
        return None
    meant = _spellings(kind)
    return next((meant[one] for one in _misspelt(name) if one in meant), None)


@cache
def _spellings(kind: type[Body]) -> dict[str, str]:
    """The fields with an effect, by each of their spellings."""
    fields = {field.alias or name: field for name, field in kind.model_fields.items()}
    ours = [name for name, field in fields.items() if field.annotation is not Any]
    return {spelling: name for name in reversed(ours) for spelling in _misspelt(name)}


def _misspelt(name: str) -> Iterator[str]:
    """A name in small letters, and without each one of them.

    Two names that differ in one letter, or in the order of two, have one of these in common.
    """
    plain = name.lower().replace("_", "").replace("-", "")
    yield plain
    if len(plain) >= SHORTEST_TYPED:
        yield from (plain[:at] + plain[at + 1 :] for at in range(len(plain)))
