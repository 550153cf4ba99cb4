"""The one exception type meant for the person who typed the command."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager


class InputError(ValueError):
    """Something given to peagle cannot be used; the message says what is wrong and how to fix it.

    Commands print it on one line and exit with code 2. Every other exception is a bug in peagle.
    """


class ConfigError(InputError):
    """Values of a configuration cannot be used.

    problems: of each value its key, which is empty where several disagree, and what is wrong.
    """

    def __init__(self, kind: str, problems: Sequence[tuple[str, str]]) -> None:
        self._problems = problems
        super().__init__(f"{kind}: {self.told()}")

    def told(self, name: Callable[[str], str] = str) -> str:
        """What is wrong, with the name of every key."""
        return "; ".join(f"{name(key)}: {what}" if key else what for key, what in self._problems)


class ContextLengthError(InputError):
    """A prompt leaves no room. Programs recognise the words, Anthropic's clients the first of
    them and OpenAI's those in the middle, and shorten the conversation. how_sure: said before the
    number of tokens."""

    def __init__(self, tokens: int, most: int, how_sure: str = "") -> None:
        super().__init__(
            f"prompt is too long: {how_sure}{tokens} tokens > {most - 1}; this model's maximum "
            f"context length is {most} tokens, output included; shorten the prompt or raise "
            "max_model_len"
        )


class MemoryShortageError(InputError):
    """There is too little memory, which may be enough where nothing else holds any."""


@contextmanager
def about(place: object) -> Iterator[None]:
    """Prefix an `InputError` raised within the block with the place that it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def refuse(what: str, problems: Collection[str]) -> None:
    """Raise `InputError` that names all problems, if there are any, behind what they are of."""
    if problems:
        raise InputError(f"{what}: {'; '.join(problems)}")


def reason(error: Exception) -> str:
    """What an exception says, without the number and the file that the system adds."""
    return getattr(error, "strerror", None) or str(error)


def lacking(what: str, extra: str) -> str:
    """The message for a library that one of our extras brings; peagle is in no package index."""
    return f"{what}; in peagle's checkout: pip install '.[{extra}]'"
