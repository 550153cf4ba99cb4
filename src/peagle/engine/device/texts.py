"""The texts of requests on the device, in which drafts are looked up."""

import torch
from torch import Tensor

from peagle.drafters.lookup import Lookup
from peagle.ops.drafts import Drafts
from peagle.ops.lookup import Found, write_newest
from peagle.ops.resident import ResidentState
from peagle.transfer import upload


class DeviceTexts:
    """Prompts and outputs by row of the request table, and the lookup in them."""

    def __init__(self, lookup: Lookup, slots: Tensor) -> None:
        """slots: [table rows, positions], of the request table."""
        self._lookup = lookup
        self._tokens = torch.zeros(slots.shape, dtype=torch.int32, device=slots.device)

    def begin(self, row: int, tokens: tuple[int, ...]) -> None:
        """All that is known of a request but its next token."""
        self._tokens[row, : len(tokens)].copy_(upload(tokens, self._tokens.device))

    def follow(self, state: ResidentState, requests: Tensor) -> None:
        """Add what requests emitted last. requests: [requests] table rows."""
        columns = state.computed, state.pending, state.emitted
        write_newest(self._tokens, requests, *columns)

    def propose(self, state: ResidentState, requests: Tensor, drafts: int) -> Found:
        """Drafts [requests, drafts] after each newest token. requests: [requests] table rows."""
        self.follow(state, requests)
        counts = state.computed.index_select(0, requests) + 1
        return self._lookup.propose(self._tokens, requests, counts, drafts)

    def record(self, found: Found, drafts: Tensor, chosen: Tensor, others: Tensor) -> None:
        """Learn from a cycle. Arguments as of `Lookup.record`."""
        self._lookup.record(found, drafts, chosen, others)


def merged(found: Found, others: Drafts | None) -> Drafts:
    """What is found where it is used, else a drafter's drafts, or any where there is none.

    The factors of drafts that were not verified teach nothing.
    """
    used = found.used[:, None]
    if others is None:
        return Drafts(found.tokens.clamp(min=0))
    alternatives = others.alternatives
    if alternatives is not None:
        alternatives = torch.where(used[..., None], -1, alternatives)
    return Drafts(torch.where(used, found.tokens, others.tokens), alternatives)
