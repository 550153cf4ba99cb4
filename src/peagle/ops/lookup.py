"""Drafts found in the text itself: what followed its last tokens when they stood there before."""

import torch
from torch import Tensor

from peagle.ops.acceptance import Path, accepted_counts
from peagle.ops.cycle_state import CycleState
from peagle.ops.draft import NO_DRAFT, Found
from peagle.ops.triton import in_kernels

MEMORY = 16
"""Matches of a length after which an old one weighs 1/e of a new one."""


@in_kernels("lookup")
def write_newest(history: Tensor, state: CycleState, requests: Tensor) -> None:
    """Add what requests emitted last to their texts.

    history: [table rows, positions] int32; requests: [requests] table rows, of which those that
    repeat write the same.
    """
    for row in requests.tolist():
        stop, count = int(state.computed[row]) + 1, int(state.pending[row])
        room = history[row, stop - count : stop]
        room.copy_(state.emitted[row, : len(room)])


@in_kernels("lookup")
def look_up(
    history: Tensor, requests: Tensor, counts: Tensor, drafts: int, shortest: int, gains: Tensor
) -> Found:
    """The longest match of each text's end earlier in it, the latest of equally long ones.

    A match that reaches the end goes on with itself: "ab ab ab" is followed by "ab ab".

    history: [table rows, positions] int32; requests: [requests] table rows; counts: [requests]
    tokens that are known of each; shortest: fewest tokens that must match; gains: [longest + 1]
    what drafts after a match of each length gain; more tokens than `longest` are not compared.
    """
    most, longest = int(counts.max()), len(gains) - 1
    texts = history[requests, :most].long()
    ends = counts[:, None] - 1
    back = torch.arange(longest, device=texts.device)
    last = texts.gather(1, (ends - back).clamp(min=0))  # the last token, the one before it, ...
    places = torch.arange(most, device=texts.device)
    candidates = (places >= shortest - 1) & (places < ends)
    for step in range(shortest):
        candidates[:, step:] &= texts[:, : most - step] == last[:, step, None]
    which, where = candidates.nonzero(as_tuple=True)
    if not len(which):
        none = torch.zeros_like(counts)
        return Found(none.new_full((len(counts), drafts), NO_DRAFT), none, none.bool())
    before = where[:, None] - back
    alike = (texts[which[:, None], before.clamp(min=0)] == last[which]) & (before >= 0)
    matched = alike.cumprod(dim=1).sum(dim=1)
    best = torch.full_like(counts, -1)
    best.scatter_reduce_(0, which, matched * most + where, "amax")
    found = best >= 0
    place, lengths = (best % most)[:, None], torch.where(found, best // most, 0)
    period = (ends - place).clamp(min=1)
    followers = place + 1 + torch.arange(drafts, device=texts.device) % period
    tokens = texts.gather(1, followers.clamp(max=most - 1))
    used = found & (gains[lengths] > 0)
    return Found(torch.where(found[:, None], tokens, NO_DRAFT), lengths, used)


@in_kernels("lookup")
def weigh(gains: Tensor, found: Found, path: Path, price: float) -> None:
    """Learn from a cycle, in place, what matches of each length are worth.

    What followed a match is compared with what the target chose, also where other drafts were
    verified: then as far as these were right, and one token more.

    gains: [longest + 1]; path: of what was verified; price: drafts that must be right.
    """
    known = path.accepted + 1
    gained = accepted_counts(found.tokens, path.chosen).minimum(known).float() - price
    none = torch.zeros_like(gains)
    count = none.index_add(0, found.lengths, torch.ones_like(gained))
    total = none.index_add(0, found.lengths, gained)
    keep = torch.exp(-count / MEMORY)
    gains.mul_(keep).add_((1 - keep) * total / count.clamp(min=1))
