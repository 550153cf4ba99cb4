"""Groups of options: one parameter of a command that several flags make."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from peagle.configuration import Config
from peagle.errors import ConfigError, InputError

Result = TypeVar("Result")
Part = TypeVar("Part")
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
SHOWN = " Default: "
"""In a field's doc: what follows is shown as the option's default."""


class Flags(Config):
    """Options of a command as a configuration: each field is one, and its doc the option's help."""


def _distinct(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
    return tuple(dict.fromkeys(check(parts)))


Several = Annotated[tuple[Part, ...], WrapValidator(_distinct)]
"""Distinct values in one option, with commas between them."""


@dataclass(frozen=True)
class Group:
    """The metadata of a parameter whose value `make` makes from `options`, its own parameters."""

    make: Callable[..., Any]
    options: tuple[Parameter, ...]


def group(make: Callable[..., Any]) -> Group:
    """The group of a function's parameters."""
    return Group(make, tuple(signature(make).parameters.values()))


def fields(config: type[Config], names: str, **defaults: Any) -> Group:
    """The group of some fields of a configuration: a dict of those with a value.

    names: with spaces between them. Types and limits are the configuration's, and its defaults but
    for a command's own; the first sentence of a field's doc is the option's help.
    """
    return Group(_given, tuple(_option(config, name, defaults) for name in names.split()))


def _given(**values: Any) -> dict[str, Any]:
    """Without the options that are left to their configuration."""
    return {name: value for name, value in values.items() if value is not None}


def _option(config: type[Config], name: str, defaults: Mapping[str, Any]) -> Parameter:
    field = config.model_fields[name]
    default = defaults.get(name, Parameter.empty if field.is_required() else field.default)
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    if default in ("", "{}", "[]", []):  # nothing that is worth showing
        default = None
    told, _, shown = " ".join(str(field.description).split()).partition(SHOWN)
    first = told.partition(". ")[0].removesuffix(".") + "."
    name = field.alias or name
    flag = flag_name(name)
    names = f"{flag}/--no-{flag[2:]}" if default is True else flag
    option = typer.Option(names, help=first, show_default=shown or True)
    annotation: Any = Annotated[_without_limits(field.annotation), option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _without_limits(annotation: Any) -> Any:
    """A field's type as typer reads it: the configuration checks limits, and parts text."""
    if get_origin(annotation) is Annotated:
        return _without_limits(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return str
    first, *others = get_args(annotation) or [annotation]
    return _without_limits(first) | None if others == [NoneType] else annotation


def flag_name(parameter: str) -> str:
    """The flag of a command's parameter."""
    return "--" + parameter.replace("_", "-")


@contextmanager
def from_flags(**renamed: str) -> Iterator[None]:
    """Let errors of a configuration made in the block name its flags.

    renamed: the flags whose names are not those of their keys.
    """

    def flag(key: str) -> str:
        field = key.partition(".")[0]
        return renamed.get(field, flag_name(field))

    try:
        yield
    except ConfigError as error:
        raise InputError(error.told(flag)) from None


def flattened(command: Callable[..., Result]) -> Callable[..., Result]:
    """A command with the options of its groups among its parameters, as typer reads them."""
    groups = dict(_groups(command))
    options = [
        one.replace(kind=Parameter.KEYWORD_ONLY)
        for name, parameter in signature(command).parameters.items()
        for one in (groups[name].options if name in groups else [parameter])
    ]

    @wraps(command)
    def flat(**values: Any) -> Result:
        for name, found in reversed(groups.items()):  # first the flags that lack their values
            own = {option.name: values.pop(option.name) for option in found.options}
            with from_flags():
                values[name] = found.make(**own)
        return command(**values)

    flat.__annotations__ = {option.name: option.annotation for option in options}
    flat.__signature__ = Signature(options)  # type: ignore[attr-defined]
    return flat


def _groups(command: Callable[..., Any]) -> Iterator[tuple[str, Group]]:
    for name, parameter in signature(command).parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, Flags):
            options = tuple(_option(kind, field, {}) for field in kind.model_fields)
            yield name, Group(partial(_made, kind), options)
        for metadata in get_args(kind)[1:]:
            if isinstance(metadata, Group):
                yield name, metadata


def _made(kind: type[Flags], **values: Any) -> Flags:
    return kind(**_given(**values))
