"""How many drafted tokens the target's own choices confirm."""

from torch import Tensor


def accepted_counts(drafts: Tensor, chosen: Tensor) -> Tensor:
    """Length of the longest prefix of drafts equal to the target's choices.

    drafts: [requests, k], padded with a value that the target never chooses (-1 is its choice where
    logits are NaN); chosen: [requests, k + 1], the token the target chooses after each prefix.
    Returns [requests]; a request emits its first `accepted + 1` chosen tokens.

    The choice is the argmax, or under sampling a draw whose randomness depends on nothing but
    (seed, position, token). A drafted token x proposed with certainty is then accepted with
    probability p(x), and a rejected position emits a token drawn from p given that it is not x: the
    rejection rule of speculative sampling, and token for token what sampling without speculation
    emits.
    """
    return (drafts == chosen[:, :-1]).long().cumprod(dim=1).sum(dim=1)
