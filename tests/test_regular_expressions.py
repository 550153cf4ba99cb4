"""Regular expressions take a time that grows with a text's length, and not with its square."""

import importlib
import pkgutil
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import peagle

LENGTHS = (1 << 10, 1 << 13, 1 << 16)
"""The short ones are there to fail early."""
SECONDS = 2.0
"""Of a processor, for the longest text; what is linear takes milliseconds."""
COMMON = "a0_- \t\n\"'\\{}[]<>/.:,|=é"
METHODS = ("search", "match", "fullmatch", "split", "sub", "findall", "finditer")
GIVEN = re.compile(rf"""re\.({"|".join(METHODS)})\(\s*(r"[^"]*")""")
OUTSIDE = ("peagle.bench", "peagle.cli", "peagle.ops", "peagle.plot_style", "peagle.train")
"""Packages that read no client's text."""


def uses() -> Iterator[tuple[str, str | bytes, int, str]]:
    """Module, expression, its flags and a method by which it is used, of all modules."""
    sources = {
        module.name: Path(importlib.util.find_spec(module.name).origin).read_text()
        for module in pkgutil.walk_packages(peagle.__path__, "peagle.")
        if not module.name.startswith(OUTSIDE) and module.name != "peagle.__main__"
    }
    whole = "\n".join(sources.values())
    for module, source in sources.items():
        for method, pattern in GIVEN.findall(source):
            yield module, eval(pattern), 0, method
        if "re.compile(" not in source:
            continue
        for name, found in vars(importlib.import_module(module)).items():
            if isinstance(found, re.Pattern):
                for method in set(re.findall(rf"\b{name}\.(\w+)\(", whole)) & {*METHODS}:
                    yield module, found.pattern, found.flags, method


EVERY = sorted(set(uses()), key=str)


def test_they_are_found():
    assert len(EVERY) > 30
    assert {"search", "match", "fullmatch", "sub", "finditer"} <= {method for *_, method in EVERY}


@pytest.mark.parametrize(
    ("pattern", "flags", "method"),
    [use[1:] for use in EVERY],
    ids=[f"{module}:{pattern!r}"[:70] for module, pattern, *_ in EVERY],
)
def test_the_time_of_one_is_bounded(pattern: str | bytes, flags: int, method: str):
    compiled = re.compile(pattern, flags)
    use = getattr(compiled, method)
    letters = pattern if isinstance(pattern, str) else pattern.decode()
    for letter in dict.fromkeys(letters + COMMON):
        for length in LENGTHS:
            text = letter * length
            given = text if isinstance(pattern, str) else text.encode()
            began = time.process_time()
            found = (
                use("", given)
                if method == "sub" and isinstance(pattern, str)
                else (use(b"", given) if method == "sub" else use(given))
            )
            if method == "finditer":
                all(found)
            assert time.process_time() - began < SECONDS, (letter, length)
