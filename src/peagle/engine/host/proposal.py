"""What is drafted in a cycle: by a drafter, or looked up in the requests' own texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peagle.drafters.lookup import Lookup
from peagle.engine.host.rows import Part
from peagle.ops.acceptance import NO_DRAFT
from peagle.ops.drafts import Drafts
from peagle.ops.lookup import Found


class Rivals(NamedTuple):
    """What a lookup proposed, and who else did."""

    found: Found
    verified: Tensor
    """[drafting, drafts] what was taken; `NO_DRAFT` where a part drafts less."""
    others: Tensor | None
    """[drafting, drafts] a drafter's own, likewise; None without one."""


@dataclass(frozen=True)
class Proposal:
    """Drafts of the parts of a step that want some."""

    work: tuple[Part, ...]
    """All parts; without a drafter, those in whose text nothing was found draft nothing."""
    tokens: Tensor
    """[sum(drafts)] of these, part after part."""
    drafting: tuple[Part, ...]
    """The parts that wanted drafts."""
    drafter: Drafts | None = None
    """[sum(drafts)] a drafter's own, of those."""
    rivals: Rivals | None = None
    """What was found in their texts, if anything was looked for."""

    @property
    def sources(self) -> dict[int, bool]:
        """Whether a part's drafts were looked up, by table row."""
        if self.rivals is None:
            return {}
        used = self.rivals.found.used.tolist()
        return {part.row: each for part, each in zip(self.drafting, used, strict=True)}


class Texts:
    """The texts of all requests, in which drafts are looked up."""

    def __init__(self, lookup: Lookup, rows: int, positions: int, device: torch.device) -> None:
        """rows: of the request table; positions: of the longest text."""
        self._lookup = lookup
        self._tokens = torch.zeros(rows, positions, dtype=torch.int32, device=device)
        self._ends: list[set[tuple[int, ...]]] = [set() for _ in range(rows)]
        """By table row, the shortest runs of tokens that could match, but for the newest."""
        self._read = [0] * rows
        """How many tokens of each text these are from."""

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """All that is known of a request that gets a row."""
        self._ends[row].clear()
        self._read[row] = 0
        self.write(row, 0, tokens)

    def write(self, row: int, start: int, tokens: Sequence[int]) -> None:
        """Tokens of a request from a position on; none after the last position."""
        text = self._tokens[row, start:]
        text[: len(tokens)] = torch.tensor(tokens[: len(text)], dtype=torch.int32)

    def propose(self, proposal: Proposal) -> Proposal:
        """The same with what is found in place of a drafter's drafts, where that is better."""
        drafting, device = proposal.drafting, self._tokens.device
        repeats = [self._repeats(part.row, part.request.tokens) for part in drafting]
        if not any(repeats):
            if proposal.drafter is not None:
                return proposal
            return replace(proposal, work=tuple(replace(part, drafts=0) for part in proposal.work))
        rows = torch.tensor([part.row for part in drafting], device=device)
        counts = torch.tensor([len(part.request.tokens) for part in drafting], device=device)
        most = max(part.drafts for part in drafting)
        found = self._lookup.propose(self._tokens, rows, counts, most)
        return _alone(proposal, found) if proposal.drafter is None else _beside(proposal, found)

    def _repeats(self, row: int, tokens: list[int]) -> bool:
        """Whether a text's last tokens stood there before: seldom, and cheaper to ask first."""
        ends, size = self._ends[row], self._lookup.shortest
        for stop in range(max(self._read[row], size), len(tokens)):
            ends.add(tuple(tokens[stop - size : stop]))
        self._read[row] = len(tokens)
        return tuple(tokens[-size:]) in ends

    def record(self, rivals: Rivals, chosen: Tensor) -> None:
        """Learn from what the target chose. chosen: [drafting, drafts + 1], -1 where unknown."""
        self._lookup.record(rivals.found, rivals.verified, chosen, rivals.others)


def _alone(proposal: Proposal, found: Found) -> Proposal:
    """What is found and used; the other parts draft nothing."""
    used = {
        part.row: part.drafts * is_used
        for part, is_used in zip(proposal.drafting, found.used.tolist(), strict=True)
    }
    work = tuple(
        replace(part, drafts=used[part.row]) if part.drafts else part for part in proposal.work
    )
    verified = _cut(found.tokens, list(used.values()))
    return replace(
        proposal, work=work, tokens=_flat(verified), rivals=Rivals(found, verified, None)
    )


def _beside(proposal: Proposal, found: Found) -> Proposal:
    """What is found where it is used, else the drafter's own."""
    ks = [part.drafts for part in proposal.drafting]
    own = pad_sequence(list(proposal.tokens.split(ks)), batch_first=True, padding_value=NO_DRAFT)
    verified = _cut(torch.where(found.used[:, None], found.tokens, own), ks)
    return replace(proposal, tokens=_flat(verified), rivals=Rivals(found, verified, own))


def _cut(drafts: Tensor, counts: Sequence[int]) -> Tensor:
    """The first so many drafts of each request [requests, most]; `NO_DRAFT` after them."""
    columns = torch.arange(drafts.shape[1], device=drafts.device)
    wanted = columns < torch.tensor(counts, device=drafts.device)[:, None]
    return torch.where(wanted, drafts, NO_DRAFT)


def _flat(padded: Tensor) -> Tensor:
    """One request's drafts after another's."""
    return padded[padded != NO_DRAFT]
