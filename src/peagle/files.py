"""Files and directories that appear whole or not at all; YAML."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from peagle.errors import InputError, reason

STDOUT = Path("-")
"""What stands for standard output in place of a result file."""


@contextmanager
def unfinished(path: Path, writer: str = "") -> Iterator[Path]:
    """A place beside `path`, ending in `.part`, for a file until it is whole and is renamed.

    What is still there after the block is removed. writer: tells processes that may write the same
    file at once apart.
    """
    scratch = path.with_name(f"{path.name}{writer}.part")
    try:
        yield scratch
    finally:
        with suppress(OSError):
            scratch.unlink()


@contextmanager
def replacing(path: Path, writer: str = "") -> Iterator[Path]:
    """As `unfinished`; the file is renamed to `path` when the block ends without an error.

    Its content is on disk before its name is, so that a lost machine leaves one or the other whole.
    """
    with unfinished(path, writer) as scratch:
        yield scratch
        sync(scratch)
        scratch.replace(path)
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, held: str) -> Iterator[None]:
    """A file that one process at a time holds, and removes. Raises `InputError` saying `held`."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(held) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def output_lock(output: Path, first: bool = True) -> AbstractContextManager[None]:
    """Keep other runs from an output; the first rank alone holds it. Raises `InputError`."""
    held = f"another run is writing output {output}; wait for it, or name another"
    return locked(output.with_name(f"{output.name}.lock"), held) if first else nullcontext()


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """An empty directory that takes the place of `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        yield fresh
        for written in (*fresh.rglob("*"), fresh):
            sync(written)
        before = Path(scratch) / "before"
        try:
            if path.exists():
                path.rename(before)
            fresh.rename(path)
            sync(path.parent)
        except BaseException:  # such as a signal's: what was there must not go with the scratch
            if before.exists() and not path.exists():
                before.rename(path)
            raise


@contextmanager
def rewritten_file(path: Path) -> Iterator[Callable[[str], None]]:
    """A function that gives a file its text; called again, it replaces the whole text at once.

    Before the block runs it is known whether the file can be written, so that a long run learns at
    its start: raises `InputError` if not. The function raises `OSError`, and the text before stays.
    """
    place = _writable(path)
    with unfinished(place, f".{os.getpid()}") as scratch:

        def write(text: str) -> None:
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(place)

        with writing(path):
            scratch.touch(exist_ok=False)
        yield write


class _OneOfEach(yaml.SafeLoader):
    """YAML in which no key stands twice: the first would be lost without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"{key.value} stands there twice, again in line {line}")
            seen.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key))
        return node


def read_yaml(path: Path) -> dict[Any, Any]:
    """The keys and values of a YAML file. Raises `InputError` naming the file if it has none."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_OneOfEach)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from None
    except (ValueError, yaml.YAMLError) as error:  # ValueError for a 13th month
        raise InputError(f"{path} cannot be read as YAML: {error}".replace("\n", " ")) from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold keys and values, one per line")
    return values


def refuse_existing(path: Path, force: bool) -> None:
    """Raise `InputError` for a file that exists, unless the user gave `--force`."""
    if not force and os.path.isfile(os.path.expanduser(path)):
        raise InputError(f"{path} exists; give another name, or --force to replace it")


def _writable(path: Path) -> Path:
    """The file that a path leads to. Raises `InputError` for one that may not be replaced."""
    with writing(path):
        place = Path(os.path.expanduser(path)).resolve()  # unlike Path's leaves ~nobody as it is
        replaceable = not place.exists() or (place.is_file() and os.access(place, os.W_OK))
    if not replaceable:
        raise InputError(f"{path} cannot be written: it is not a file that may be replaced")
    return place


@contextmanager
def writing(place: Path, advice: str = "") -> Iterator[None]:
    """Raises `InputError`, with some advice, when a disk refuses a write within the block."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        told = f"{place} cannot be written: {reason(error)}"
        raise InputError(f"{told}; {advice}" if advice else told) from None
