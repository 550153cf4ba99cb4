"""Loss and gradient of a row in one program, which reads the row twice, then from the cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def weigh(
    loss: str, draft: Tensor, target: Tensor, which: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """As the reference; the gradient takes the place of `draft`."""
    rows, vocab = draft.shape
    losses = torch.empty(rows, dtype=torch.float32, device=draft.device)
    block = max(128, min(BLOCK, triton.next_power_of_2(vocab)))
    _weigh[(rows,)](
        draft,
        target,
        which,
        weights,
        losses,
        vocab,
        KL=loss == "kl",
        BLOCK=block,
        # no more threads than numbers: none reads what another has already overwritten
        num_warps=min(8, block // 128),
    )
    return losses.sum(), draft


@triton.jit
def _weigh(draft, target, which, weights, losses, vocab, KL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ours = draft + row * vocab
    theirs = target + tl.load(which + row).to(tl.int64) * vocab
    weight = tl.load(weights + row)
    lane = tl.arange(0, BLOCK)
    # the highest logit so far, and the sum of exponentials under it
    high, mass = float("-inf"), 0.0
    their_high, their_mass = float("-inf"), 0.0
    best = 0
    for begin in range(0, vocab, BLOCK):
        column = begin + lane
        inside = column < vocab
        x = tl.load(ours + column, mask=inside, other=float("-inf")).to(tl.float32)
        y = tl.load(theirs + column, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(high, tl.max(x, 0))
        mass = mass * tl.exp(high - higher) + tl.sum(tl.exp(x - higher), 0)
        high = higher
        their_higher = tl.maximum(their_high, tl.max(y, 0))
        if KL:
            fade = tl.exp(their_high - their_higher)
            their_mass = their_mass * fade + tl.sum(tl.exp(y - their_higher), 0)
        else:
            first = tl.min(tl.where(y == their_higher, column, vocab), 0)
            best = tl.where(their_higher > their_high, first, best)
        their_high = their_higher
    level = high + tl.log(mass)
    total = tl.zeros([BLOCK], tl.float32)
    if KL:
        their_level = their_high + tl.log(their_mass)
    else:
        total += tl.where(lane == 0, level - tl.load(ours + best).to(tl.float32), 0.0)
        tl.debug_barrier()  # before the row is overwritten
    for begin in range(0, vocab, BLOCK):
        column = begin + lane
        inside = column < vocab
        x = tl.load(ours + column, mask=inside, other=0.0).to(tl.float32) - level
        if KL:
            y = tl.load(theirs + column, mask=inside, other=0.0).to(tl.float32) - their_level
            share = tl.exp(y)
            total += tl.where(inside, share * (y - x), 0.0)
        else:
            share = tl.where(column == best, 1.0, 0.0)
        gradient = (tl.exp(x) - share) * weight
        tl.store(ours + column, gradient.to(draft.dtype.element_ty), mask=inside)
    tl.store(losses + row, tl.sum(total, 0) * weight)
