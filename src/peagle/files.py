"""Files that appear whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from peagle.errors import InputError, reason


@contextmanager
def replacing(path: Path, writer: str = "") -> Iterator[Path]:
    """Where to write what gets this name in one rename, once the block is through.

    writer: of several that may write at once, this one's name.
    """
    scratch = path.with_name(f"{path.name}{writer}.part")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def writing(place: Path, advice: str) -> Iterator[None]:
    """Raises `InputError` for what a disk refuses within the block."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"{place} cannot be written: {reason(error)}; {advice}") from None
