"""Strings that end a text."""

from collections.abc import Iterator, Sequence


class StopStrings:
    """Follows a text as it comes, and ends it before the first stop string.

    included: whether the text keeps the string that ended it.
    """

    def __init__(self, strings: Sequence[str], included: bool = False) -> None:
        self._strings, self._included = tuple(strings), included
        self._most = max(map(len, strings), default=1) - 1
        """Most characters of a stop string that is not whole yet."""
        self._held = ""
        self.found: str | None = None
        """The one that ended the text."""

    def feed(self, text: str, counts: bool = True) -> str:
        """The text that can be shown now; what may begin a stop string is held back.

        counts: whether a string that becomes whole with `text` ends it.
        """
        known, whole = len(self._held), self._held + text
        if counts and (ends := [*self._ends(whole, known)]):
            place, after, self.found = min(ends)
            self._held = ""
            return whole[: after if self._included else place]
        shown = max(len(whole) - self._most, 0)
        self._held = whole[shown:]
        return whole[:shown]

    def release(self) -> str:
        """What was held back, once no stop string can follow it."""
        held, self._held = self._held, ""
        return held

    def _ends(self, text: str, known: int) -> Iterator[tuple[int, int, str]]:
        """First and past-the-last character of strings that reach past the first `known` ones."""
        for string in self._strings:
            if string in text:
                place = text.find(string, max(known - len(string) + 1, 0))
                if place >= 0:
                    yield place, place + len(string), string
