"""Which drafts the target's own choices confirm, and how many to expect."""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.ops.draft import NO_DRAFT, Draft
from peagle.ops.triton import in_kernels


@dataclass(frozen=True)
class Path:
    """Drafts one behind another and the target's choices; in a tree, the path that choices
    follow."""

    drafts: Tensor
    """[requests, depth] a chain's drafts; a tree's accepted ones, then `NO_DRAFT`."""
    chosen: Tensor
    """[requests, depth + 1] what the target takes after each prefix of the drafts."""
    rows: Tensor | None = None
    """[requests, depth + 1] a tree's rows along the path, from the root on, and any behind the last
    accepted one; None: a chain's rows, one behind another."""

    reads: Tensor | None = None
    """[requests, depth + 1] the same rows, counted over all requests."""

    @property
    def accepted(self) -> Tensor:
        """[requests] how many drafts are accepted."""
        return accepted_counts(self.drafts, self.chosen)


@in_kernels("tree", lambda _, draft, chosen: draft.tree is not None)
def accept(draft: Draft, chosen: Tensor) -> Path:
    """The drafts that the target's choices confirm, in `Path`'s form.

    chosen: [requests, drafts + 1] what the target takes after each of the draft's rows, -1 for NaN
    logits.
    """
    if draft.tree is None:
        return Path(draft.tokens, chosen)
    columns = draft.tokens.tolist(), draft.tree.parents.tolist(), chosen.tolist()
    paths = [_walked(*one, draft.depth) for one in zip(*columns, strict=True)]
    drafts, taken, rows = (torch.tensor(c, device=chosen.device) for c in zip(*paths, strict=True))
    before = torch.arange(len(rows), device=chosen.device)[:, None] * chosen.shape[1]
    return Path(drafts, taken, rows, before + rows)


def _walked(
    tokens: list[int], parents: list[int], chosen: list[int], most: int
) -> tuple[list[int], list[int], list[int]]:
    """Drafts, choices and rows along one request's path, from the root on."""
    # of equal nodes the first one, as the kernel finds it
    after: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(parents, tokens, strict=True)):
        after.setdefault(edge, node + 1)
    # a row behind the accepted ones is in its own place, so that nothing of it is moved
    rows, drafts, taken = [*range(most + 1)], [NO_DRAFT] * most, [-1] * (most + 1)
    row = 0
    for depth in range(most + 1):
        rows[depth], token = row, chosen[row]
        taken[depth], following = token, after.get((row, token))
        if depth == most or following is None:
            break
        drafts[depth], row = token, following
    return drafts, taken, rows


def accepted_counts(drafts: Tensor, chosen: Tensor) -> Tensor:
    """Length of the longest prefix of drafts equal to the target's choices.

    drafts: [requests, k], padded with `NO_DRAFT`; chosen: [requests, k + 1], the token the target
    chooses after each prefix.
    Returns [requests]; a request emits its first `accepted + 1` chosen tokens.

    The choice is the argmax, or under sampling a draw whose randomness depends on nothing but
    (seed, position, token). A drafted token x proposed with certainty is then accepted with
    probability p(x), and a rejected position emits a token drawn from p given that it is not x: the
    rejection rule of speculative sampling, and token for token what sampling without speculation
    emits.
    """
    return (drafts == chosen[:, :-1]).long().cumprod(dim=1).sum(dim=1)


def shared_draw(target: Tensor, draft: Tensor) -> Tensor:
    """The probability that two distributions choose the same token in one race: [rows].

    target, draft: [rows, tokens] probabilities of some tokens, all that the draft can be; the rest
    of the target's are other tokens. Token v wins both races if every u has a time above v's times
    the larger of p_u / p_v and q_u / q_v, so with probability one over the sum of these. Sorted by
    p / q, the ratio of p is the larger one up to v, and that of q behind it.
    """
    p, q = target.double(), draft.double()
    # a token that the target never draws is behind all others, and its 0 / 0 wins nothing
    order = torch.where(p > 0, p / q, -1.0).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    # sums that rounding has made negative are none
    rest = (1 - p.sum(dim=-1, keepdim=True)).clamp(min=0)
    through = rest + p.cumsum(dim=-1)
    behind = q.sum(dim=-1, keepdim=True) - q.cumsum(dim=-1)
    wins = 1 / (through / p + behind.clamp(min=0) / q)
    return wins.nan_to_num(0.0).sum(dim=-1)
