"""Drafts drawn among candidates, in one launch.

Where pairs of drafts count, a slot needs the draft of the slot before it: then one program walks
along a request's slots, and scores the pairs with the draft that it took. Else each slot has a
program of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.candidates import Candidates, Pairs
from peagle.ops.draft import NO_DRAFT
from peagle.ops.race import SHARPENING, Race
from peagle.ops.triton.sampling import arrival_time, row_key

HEAT, NONE = tl.constexpr(SHARPENING), tl.constexpr(NO_DRAFT)
"""The factor of temperatures, and what stands in place of a token where there is no draft."""


class PairSides(NamedTuple):
    """`Pairs` as kernels read them."""

    predecessor: Tensor
    successor: Tensor
    gates: Tensor
    rank: int
    stride: int
    """The distance of two slots' gates."""


def draw(found: Candidates, pairs: Pairs | None, race: Race, depth: int) -> Tensor:
    """As the reference."""
    requests, slots, count = found.scores.shape
    out = torch.empty(requests, slots, dtype=torch.int64, device=found.scores.device)
    sides, rank = pair_sides(pairs)
    _draw[(requests, slots if pairs is None else 1)](
        found, sides, race, out, slots, depth, count,
        COUNT=triton.next_power_of_2(count), RANK=rank, num_warps=1 if pairs is None else 4,
    )  # fmt: skip
    return out


def pair_sides(pairs: Pairs | None) -> tuple[PairSides | None, int]:
    """What kernels read of pairs, and how many columns they have for their rank."""
    if pairs is None:
        return None, 1
    rank = pairs.gates.shape[-1]
    return PairSides(*pairs, rank, pairs.gates.stride(1)), triton.next_power_of_2(rank)


@triton.jit(do_not_specialize=["depth"])
def _draw(found, pairs, race, out, slots, depth, count, COUNT: tl.constexpr, RANK: tl.constexpr):
    index, begin = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, how = tl.load(race.requests + index), race.sampling
    temperature = tl.load(how.temperature + request)
    top_k, min_p = tl.load(how.top_k + request), tl.load(how.min_p + request)
    seed, position = tl.load(how.seeds + request), tl.load(race.newest + request) + 1 + depth
    lane = tl.arange(0, COUNT)
    inside = lane < count
    previous = tl.zeros([], tl.int64)
    for slot in range(begin, slots if pairs is not None else begin + 1):
        at = (index * slots + slot) * count + lane
        score = tl.load(found.scores + at, mask=inside, other=float("-inf"))
        token = tl.load(found.tokens + at, mask=inside, other=0)
        if pairs is not None:
            draft = tl.load(found.ids + at, mask=inside, other=0)
            score += added_scores(pairs, index * slots + slot, slot, previous, draft, RANK)
        score = kept_scores(score, temperature, top_k, min_p)
        delay = tl.log(arrival_time(row_key(seed, position + slot), token))
        value = raced(score, delay, temperature)
        first = tl.min(tl.where(value == tl.max(value, 0), lane, COUNT), 0)
        first = tl.where(first < COUNT, first, 0)  # no lane where scores are no numbers
        previous = tl.sum(tl.where(lane == first, token, 0), 0)
        tl.store(out + index * slots + slot, previous)


@triton.jit
def raced(score, delay, temperature):
    """Scores at the heat of drafts, less the delays; at 0 the scores alone."""
    cold = temperature == 0
    return tl.where(cold, score, score / tl.where(cold, 1.0, temperature * HEAT) - delay)


@triton.jit
def added_scores(pairs, at, slot, previous, drafts, RANK: tl.constexpr):
    """What the draft before adds to the scores of some drafts of a slot, the `at`th of all."""
    column = tl.arange(0, RANK)
    # the first slot has read the token before it
    inside = column < tl.where(slot > 0, pairs.rank, 0)
    given_at = pairs.predecessor + previous * pairs.rank + column
    given = tl.load(given_at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(pairs.gates + at * pairs.stride + column, mask=inside, other=0.0).to(tl.float32)
    following_at = pairs.successor + drafts[:, None] * pairs.rank + column[None, :]
    following = tl.load(following_at, mask=inside[None, :], other=0.0).to(tl.float32)
    return tl.sum(following * (given * gate)[None, :], 1)


@triton.jit
def kept_scores(score, temperature, top_k, min_p):
    """Scores with those outside top-k and below min-p at -inf."""
    above = tl.sum((score[None, :] > score[:, None]).to(tl.int32), 1)
    share = tl.exp((score - tl.max(score, 0)) / tl.where(temperature == 0, 1.0, temperature))
    stays = ((top_k == 0) | (above < top_k)) & (share >= min_p)
    return tl.where(stays, score, float("-inf"))
