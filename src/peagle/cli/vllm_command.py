"""The command line of `serve`, read as vLLM reads its own."""

import argparse
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from peagle.cli.unknown_flags import OTHER_NAMES
from peagle.cli.vllm_flags import Flag, off_names, vllm_flags
from peagle.errors import InputError
from peagle.files import read_yaml

FLAG = re.compile(r"(--?[a-zA-Z][^.=]*)(?:\.([^=+]+))?(?:=(.*))?", re.DOTALL)
"""A flag's name, a key of its JSON object, and a value."""
NARGS: Mapping[str, Any] = {"": 0, "=": None, "=+": "+"}
"""What a flag takes, as argparse says it."""
AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
AMOUNTS = ("--max-model-len", "--max-num-batched-tokens", "--kv-cache-memory")
"""Our flags that take numbers in vLLM's units: 32k is 32000, and 32K is 32768."""
SECRET = re.compile(r"(--(?:api-key|hf-token)[ =])\S+")


class Command(NamedTuple):
    """What the words after `serve` ask for."""

    words: list[str]
    """The same in flags and values of ours."""
    said: Sequence[str] = ()
    """Lines on vLLM's flags that are left out."""
    flags: Mapping[str, Sequence[str]] = {}
    """Where vLLM is to be started: our flags, with vLLM's values."""
    vllms: Sequence[str] = ()
    """And the words that only vLLM knows."""


class Given(NamedTuple):
    """A flag as it is given."""

    flag: Flag
    name: str
    values: list[str]

    @property
    def words(self) -> list[str]:
        """A flag of ours, with values as we take them."""
        values, name = self.values, self.flag.name
        if name in AMOUNTS and (found := AMOUNT.fullmatch(values[0])):
            number, unit = found.groups()
            power = 1 + "kmgt".index(unit.lower())
            values = [str(int(float(number) * (1000 if unit.islower() else 1024) ** power))]
        return [word for value in values for word in (name, value)] or [name]


def read_command(words: Sequence[str], options: Sequence[Any]) -> Command:
    """Read the words after `serve`; where vLLM is to be started, its own flags stay as they are.

    options: those of our command. Raises `InputError` for a flag that cannot be kept.
    """
    if ("--engine", "vllm") in pairwise(words) or "--engine=vllm" in words:
        return _for_vllm(*_read(words, _our_flags(options, {"--target": ("--model",)})))
    theirs = vllm_flags()
    given, kept = _read(_with_file(words), theirs | _our_flags(options, OTHER_NAMES))
    start = SECRET.sub(r"\1...", shlex.join(["peagle", "serve", *words, "--engine", "vllm"]))
    said: list[str | None] = []
    for flag, name, values in given:
        flag = theirs.get(f"{flag.name} {' '.join(values)}", flag)
        if not flag.fate:
            kept += Given(flag, name, values).words
        else:
            said.append(flag.left_out(name, values, start))
    return Command(kept, [line for line in said if line is not None])


def _for_vllm(given: Sequence[Given], others: Sequence[str]) -> Command:
    """A command that starts vLLM, whose own words may only come behind a target."""
    flags = {one.flag.name: one.values for one in given}
    targets = int(bool(others) and not others[0].startswith("-"))
    if others and not targets and "--target" not in flags:
        raise InputError(f"no such option: {others[0]}; vLLM's own come after the target")
    words = [*others[:targets], *(word for one in given for word in one.words)]
    return Command(words, (), flags, others[targets:])


def _our_flags(options: Sequence[Any], others: Mapping[str, Sequence[str]]) -> dict[str, Flag]:
    """The options of our command by each of their names, which may be `others` too."""
    known: dict[str, Flag] = {}
    for option in options:
        if option.param_type_name == "option":
            takes = "" if option.is_flag else "=+" if option.multiple else "="
            for name in option.opts:
                known |= dict.fromkeys([name, *others.get(name, ())], Flag(name, takes))
            for name in option.secondary_opts:
                known |= dict.fromkeys([name, *off_names(option.opts[0])], Flag(name))
    return known


def _read(words: Iterable[str], known: Mapping[str, Flag]) -> tuple[list[Given], list[str]]:
    """The known flags, and all other words. Of a repeated flag the last one counts."""
    reader = _Reader(add_help=False, argument_default=argparse.SUPPRESS)
    for name, flag in known.items():
        if " " not in name:
            reader.add_argument(name, nargs=NARGS[flag.takes], action=_Keep, const=flag)
    given: dict[str, Given] = {}
    found = argparse.Namespace(given=given, several=None)
    _, others = reader.parse_known_args([*_with_objects(words)], found)
    if found.several and not others and "--target" not in given:
        told = f"{found.several.name} {' '.join(found.several.values)}"
        raise InputError(f"{told}: give the target before it, or as --target")
    return list(given.values()), others


class _Reader(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise InputError(message.removeprefix("argument "))


class _Keep(argparse.Action):
    """Keeps a flag as `Given`, and where it takes several values all that were given."""

    def __call__(self, parser: Any, found: Any, values: Any, name: str | None = None) -> None:
        flag: Flag = self.const
        given = [values] if isinstance(values, str) else values
        if len(given) > 1:
            found.several = Given(flag, name or "", given)  # a target may be among them
        before = found.given.pop(flag.name, None)
        if before is not None and flag.takes == "=+":
            given = before.values + given
        found.given[flag.name] = Given(flag, name or "", given)


def _with_file(words: Sequence[str]) -> list[str]:
    """The words, before them those of vLLM's `--config FILE`."""
    if "--config" not in words[:-1]:
        return [*words]
    at = words.index("--config")
    flags: list[str] = []
    for key, value in read_yaml(Path(words[at + 1])).items():
        if isinstance(value, bool):
            flags.append(f"--{key}" if value else f"--no-{key}")
        else:
            each = value if isinstance(value, list) else [value]
            flags += [f"--{key}={json.dumps(v) if isinstance(v, dict) else v}" for v in each]
    return [*flags, *words[:at], *words[at + 2 :]]


def _with_objects(words: Iterable[str]) -> Iterator[str]:
    """The words, with dashes in names, and one JSON object for keys that are given one by one."""
    objects: dict[str, dict[str, Any]] = {}
    left = iter(words)
    for word in left:
        found = FLAG.fullmatch(word)
        if found is None:
            yield word
            continue
        name, path, value = found[1].replace("_", "-"), found[2], found[3]
        if path is None:
            yield name if value is None else f"{name}={value}"
            continue
        place = objects.setdefault(name, {})
        *outer, key = path.split(".")
        for one in outer:
            place = place.setdefault(one, {})
        place[key] = _parsed(next(left, "") if value is None else value)
    for name, whole in objects.items():
        yield from (name, json.dumps(whole))


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
