"""Groups of options: one parameter of a command that several flags make."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args

import typer

from peagle.config import Config

Result = TypeVar("Result")
Help = str | tuple[str, str]
"""What an option does, and perhaps what is shown as its default."""


@dataclass(frozen=True)
class Group:
    """The metadata of a parameter whose value `make` makes from `options`, its own parameters."""

    make: Callable[..., Any]
    options: tuple[Parameter, ...]


def group(make: Callable[..., Any]) -> Group:
    """The group of a function's parameters."""
    return Group(make, tuple(signature(make).parameters.values()))


def fields(config: type[Config], helps: Mapping[str, Help], **defaults: Any) -> Group:
    """The group of the fields that `helps` explains: a dict of those with a value.

    Types and limits are the configuration's, and its defaults but for a command's own.
    """
    return Group(_given, tuple(_field(config, *each, defaults) for each in helps.items()))


def _given(**values: Any) -> dict[str, Any]:
    """Without the options that are left to their configuration."""
    return {name: value for name, value in values.items() if value is not None}


def _field(config: type[Config], name: str, told: Help, defaults: Mapping[str, Any]) -> Parameter:
    field = config.model_fields[name]
    default = defaults.get(name, field.default)
    text, shown = (told, True) if isinstance(told, str) else told
    flag = flag_name(name)
    names = f"{flag}/--no-{flag[2:]}" if default is True else flag
    option = typer.Option(names, help=text, show_default=shown)
    return _keyword(name, Annotated[_without_limits(field.annotation), option], default)


def _without_limits(annotation: Any) -> Any:
    """A field's type as typer reads it: the configuration checks limits."""
    first, *others = get_args(annotation) or [annotation]
    return get_args(first)[0] | None if others == [NoneType] and get_args(first) else annotation


def _keyword(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def flag_name(parameter: str) -> str:
    """The flag of a command's parameter."""
    return "--" + parameter.replace("_", "-")


def flattened(command: Callable[..., Result]) -> Callable[..., Result]:
    """A command with the options of its groups among its parameters, as typer reads them."""
    groups = dict(_groups(command))
    options = [
        _keyword(one.name, one.annotation, one.default)
        for name, parameter in signature(command).parameters.items()
        for one in (groups[name].options if name in groups else [parameter])
    ]

    @wraps(command)
    def flat(**values: Any) -> Result:
        for name, found in groups.items():
            own = {option.name: values.pop(option.name) for option in found.options}
            values[name] = found.make(**own)
        return command(**values)

    flat.__annotations__ = {option.name: option.annotation for option in options}
    flat.__signature__ = Signature(options)  # type: ignore[attr-defined]
    return flat


def _groups(command: Callable[..., Any]) -> Iterator[tuple[str, Group]]:
    for name, parameter in signature(command).parameters.items():
        for metadata in get_args(parameter.annotation)[1:]:
            if isinstance(metadata, Group):
                yield name, metadata
