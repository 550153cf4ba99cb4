"""How many drafted tokens the target's own choices confirm, and how many to expect."""

import torch
from torch import Tensor

NO_DRAFT = -2
"""Where there is none. Not -1, which is what the target chooses where its logits are NaN."""


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
    order = torch.where(p > 0, p / q, -1.0).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    rest = (1 - p.sum(dim=-1, keepdim=True)).clamp(min=0)
    through = rest + p.cumsum(dim=-1)
    behind = q.sum(dim=-1, keepdim=True) - q.cumsum(dim=-1)
    wins = 1 / (through / p + behind.clamp(min=0) / q)
    return wins.nan_to_num(0.0).sum(dim=-1)
