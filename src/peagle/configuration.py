"""What every configuration is: frozen values, checked once when they are made, trusted below."""

import json
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peagle.errors import ConfigError, InputError

NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(gt=0)]


class Config(BaseModel):
    """A frozen value whose unknown keys and impossible values raise `InputError`.

    Where a field is an option of a command, the first sentence of its doc is the option's help.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(type(self).__name__, _problems(type(self), error)) from None


SAID = ("value_error", "tuple_type", "extra_forbidden", "literal_error")
"""Types of pydantic's errors whose words have the value, or need none."""


def _problems(kind: type[Config], error: ValidationError) -> list[tuple[str, str]]:
    problems = []
    for detail in error.errors(include_url=False):
        key = ".".join(str(part) for part in detail["loc"])
        message, given = detail["msg"].removeprefix("Value error, "), detail["input"]
        message = message.replace("Tuple should", "it should")  # the reader's JSON has lists
        if detail["type"] not in SAID and isinstance(given, str | int | float):
            message = f"{message}; {given!r:.40} was given"
        if detail["type"] == "extra_forbidden":
            near = get_close_matches(key, kind.model_fields, n=1, cutoff=0.75)
            message = "no such key" + "".join(f"; did you mean {name}?" for name in near)
        if detail["type"] == "tuple_type":
            message = f"give a list: [{given}]" if isinstance(given, str) else "give a list"
        problems.append((key, message))
    return problems


def parsed(text: str | bytes) -> Any:
    """What a text says in JSON; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_json_option(name: str, text: str, example: str) -> Any:
    """The JSON value of the option `name`; the configuration that takes it checks its content."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON: {error}; give '{example}'") from None
