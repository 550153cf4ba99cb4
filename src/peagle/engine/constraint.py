"""What keeps a request's output within a form: which tokens may come next."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Constraint(Protocol):
    """Follows one request's output. All of its tokens are chosen through `allowed`."""

    @property
    def failure(self) -> str | None:
        """Why the constraint can no longer be followed; the request then ends with an error."""

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """Tokens allowed after the output and 0, 1, ... of `drafts`: [drafts + 1, bytes] uint8.

        A bit for each token of the vocabulary, the lowest of a byte first. Rows after a draft that
        is not allowed are never used.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were chosen."""
