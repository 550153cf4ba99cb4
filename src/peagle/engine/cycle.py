"""One cycle, the same on the host and on the device.

draft    a proposer says what may follow each request's newest token
verify   one pass of the target over the newest tokens and the drafts
accept   the target's choices confirm a path through each draft
commit   the path becomes the requests' state

Nothing is rolled back: keys behind the last accepted draft are overwritten by the next pass.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from peagle.ops.acceptance import Path
from peagle.ops.draft import Draft

Accept = Callable[[Draft, Tensor, Tensor], Path]
"""(draft, what the target takes after each of its rows, the requests' table rows) -> the path that
is accepted."""


class Verified(NamedTuple):
    """What the target makes of a cycle's rows."""

    logits: Tensor
    """[rows that are sampled, vocab]"""
    features: Tensor | None
    """[rows, feature size] for the proposer; None where it reads none."""


class CycleRows(Protocol):
    """The requests of one cycle: how their state is kept, and which attention runs."""

    def draft(self) -> Draft:
        """What may follow the newest tokens."""

    def verify(self, draft: Draft) -> Verified:
        """The target over newest tokens and drafts."""

    def accept(self, draft: Draft, verified: Verified) -> Path:
        """Choose a token after each row, and follow the choices."""

    def commit(self, draft: Draft, path: Path, verified: Verified) -> None:
        """Make the path the requests' state."""


def run_cycle(rows: CycleRows) -> None:
    """Draft, verify, accept and commit."""
    draft = rows.draft()
    verified = rows.verify(draft)
    path = rows.accept(draft, verified)
    rows.commit(draft, path, verified)
