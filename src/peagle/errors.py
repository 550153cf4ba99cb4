"""The one exception type meant for the person who typed the command."""


class InputError(ValueError):
    """Something given to peagle cannot be used; the message says what is wrong and how to fix it.

    Commands print it on one line and exit with code 2. Every other exception is a bug in peagle.
    """


def lacking(what: str, extra: str) -> str:
    """The message for a library that one of our extras brings; peagle is in no package index."""
    return f"{what}; in peagle's checkout: pip install '.[{extra}]'"
