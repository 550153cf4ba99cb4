"""vLLM's flags of `serve` that are not ours, from vLLM 0.33's parser: what becomes of each here."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from peagle.errors import InputError
from peagle.files import read_yaml

TABLE = Path(__file__).with_suffix(".yaml")
ENTRY = re.compile(r"([^\s=~]+)([=~]?)(\S*)")
"""A flag's names, what it takes, and values."""
OPPOSITES = {"enable-": "disable-", "disable-": "enable-"}


class Flag(NamedTuple):
    """A flag of a command line."""

    name: str
    takes: str = ""
    """Nothing; = for a value; =+ for several."""
    anyway: frozenset[str] = frozenset()
    """Values that ask for what happens anyway."""
    fate: str = ""
    """The part of the table that holds it, if it is vLLM's."""
    reason: str = ""

    def left_out(self, name: str, values: Sequence[str], start: str) -> str | None:
        """What is said of the flag, which is left out, if anything.

        name, values: as they were given. start: the command that starts vLLM with them. Raises
        `InputError` for a flag that cannot be left out.
        """
        if not self.reason or (values and self.anyway.issuperset(values)):
            return None
        told = f"{' '.join([name, *values])}: {self.reason}"
        if self.fate == "ignored":
            return told
        raise InputError(f"{told}; with vLLM: {start}" if self.fate == "left_to_vllm" else told)


@cache
def vllm_flags() -> dict[str, Flag]:
    """The table's flags by each of their names, and ours by name and value."""
    known: dict[str, Flag] = {}
    for fate, reasons in read_yaml(TABLE).items():
        for reason, entries in reasons.items():
            for names, takes, values in ENTRY.findall(entries):
                name, *others = f"--{names}".split("/")
                each = values.split("|")
                anyway = frozenset(each if takes == "=" else ())
                flag = Flag(name, takes + "+" * (values == "+"), anyway, fate, reason)
                told = [f"{name} {value}" for value in each] if takes == "~" else [name, *others]
                off = [] if takes else off_names(name)
                known |= dict.fromkeys(told, flag) | dict.fromkeys(off, Flag(name, fate="ignored"))
    return known


def off_names(switch: str) -> list[str]:
    """What turns a switch off in vLLM."""
    name = switch.removeprefix("--")
    pairs = [(on, off) for on, off in OPPOSITES.items() if name.startswith(on)]
    return [f"--no-{name}", *(f"--{off}{name.removeprefix(on)}" for on, off in pairs)]
