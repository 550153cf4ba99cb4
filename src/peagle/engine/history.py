"""The texts of all requests, for proposers that read them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.drafters.proposer import Texts
from peagle.ops.cycle_state import CycleState
from peagle.ops.lookup import write_newest
from peagle.transfer import upload


class History:
    """Prompts and outputs by row of the request table, where the target is."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        """shape: [table rows, positions of the longest text]."""
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)

    def write(self, row: int, start: int, tokens: Sequence[int]) -> None:
        """Add tokens of a request from a position on; none after the last position."""
        text = self._tokens[row, start : start + len(tokens)]
        text.copy_(upload(tokens[: len(text)], text.device))

    def follow(self, state: CycleState, requests: Tensor) -> None:
        """Add what requests emitted last. requests: [requests] table rows."""
        write_newest(self._tokens, state, requests)

    def of(self, requests: Tensor, counts: Tensor) -> Texts:
        """The texts of some requests. requests, counts: as in `Texts`."""
        return Texts(self._tokens, requests, counts)
