"""The bundled pair: a small target and a drafter of each method; and a drafter for chats."""

from pathlib import Path

from peagle.errors import InputError

PLACE = Path(__file__).parent


def bundled(name: str) -> Path:
    """The directory of the bundled `target`, `eagle3` or `peagle`, or of the `chat` drafter.

    Raises `InputError` when this installation came without it.
    """
    directory = PLACE / name
    if not (directory / "config.json").is_file():
        raise InputError(
            f"this installation lacks the bundled {name} ({directory}); "
            f"train it with recipes/{'smollm2' if name == 'chat' else 'demo'}, or give your own"
        )
    return directory


def or_bundled(given: str | None, name: str) -> str:
    """What is given, be it an empty name, which is an error and not the bundled one."""
    return str(bundled(name)) if given is None else given
