"""Which of several engines has computed the beginning of a prompt."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

PIECE = 64
"""Tokens by which beginnings are told apart."""
MOST = 1 << 16
"""Beginnings that are remembered."""


class PrefixOwners:
    """Remembers, for each beginning of prompts, which engine got it last."""

    def __init__(self) -> None:
        self._owners: OrderedDict[int, int] = OrderedDict()

    def find(self, prompt: Sequence[int], salt: str | None) -> int | None:
        """The engine that got the longest beginning of this prompt; None: nobody got any."""
        owner = None
        for beginning in _beginnings(prompt, salt):
            if beginning not in self._owners:
                break
            owner = self._owners[beginning]
        return owner

    def give(self, prompt: Sequence[int], salt: str | None, owner: int) -> None:
        """Note that an engine gets this prompt."""
        for beginning in _beginnings(prompt, salt):
            self._owners[beginning] = owner
            self._owners.move_to_end(beginning)
        while len(self._owners) > MOST:
            self._owners.popitem(last=False)


def _beginnings(prompt: Sequence[int], salt: str | None) -> Iterator[int]:
    """A hash of each beginning of whole pieces, which only those with the same salt share."""
    known = hash(salt)
    for end in range(PIECE, len(prompt) + 1, PIECE):
        known = hash((known, *prompt[end - PIECE : end]))
        yield known
