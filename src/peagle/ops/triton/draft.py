"""Drafts drawn among candidates, in one launch.

Where pairs of drafts count, a slot needs the draft of the slot before it: then one program walks
along a request's slots, and scores the pairs with the draft that it took. Else each slot has a
program of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.candidates import Candidates, Pairs
from peagle.ops.race import SHARPENING, Race
from peagle.ops.triton.sampling import arrival_time, row_key


def draw(found: Candidates, pairs: Pairs | None, race: Race, depth: int) -> Tensor:
    """As the reference."""
    requests, slots, count = found.scores.shape
    out = torch.empty(requests, slots, dtype=torch.int64, device=found.scores.device)
    sides, rank, stride = pair_sides(found, pairs)
    _draw[(requests, slots if pairs is None else 1)](
        found, sides, race, out, slots, depth, count, rank, stride,
        COUNT=triton.next_power_of_2(count), RANK=triton.next_power_of_2(rank),
        PAIRS=pairs is not None, SHARPENING=SHARPENING,
        num_warps=1 if pairs is None else 4,
    )  # fmt: skip
    return out


def pair_sides(found: Candidates, pairs: Pairs | None) -> tuple[Pairs, int, int]:
    """What kernels read of pairs, their rank and the gates' stride; anything where none count."""
    if pairs is None:
        return Pairs(*(found.scores,) * 3), 1, 1
    return pairs, pairs.gates.shape[-1], pairs.gates.stride(1)


@triton.jit(do_not_specialize=["depth"])
def _draw(
    found,
    pairs,
    race,
    out,
    slots,
    depth,
    count,
    rank,
    gates_stride,
    COUNT: tl.constexpr,
    RANK: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARPENING: tl.constexpr,
):
    index, begin = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, how = tl.load(race.requests + index), race.sampling
    temperature = tl.load(how.temperature + request)
    top_k, min_p = tl.load(how.top_k + request), tl.load(how.min_p + request)
    seed, position = tl.load(how.seeds + request), tl.load(race.newest + request) + 1 + depth
    lane = tl.arange(0, COUNT)
    inside = lane < count
    previous = tl.zeros([], tl.int64)
    for slot in range(begin, slots if PAIRS else begin + 1):
        at = (index * slots + slot) * count + lane
        score = tl.load(found.scores + at, mask=inside, other=float("-inf"))
        token = tl.load(found.tokens + at, mask=inside, other=0)
        if PAIRS:
            draft = tl.load(found.ids + at, mask=inside, other=0)
            gate = pairs.gates + (index * slots + slot) * gates_stride
            within = tl.where(slot > 0, rank, 0)  # the first slot has read the token before it
            score += added_scores(pairs, gate, previous, draft, rank, within, RANK)
        score = kept_scores(score, temperature, top_k, min_p)
        delay = tl.log(arrival_time(row_key(seed, position + slot), token))
        value = raced(score, delay, temperature * SHARPENING)
        first = tl.min(tl.where(value == tl.max(value, 0), lane, COUNT), 0)
        first = tl.where(first < COUNT, first, 0)  # no lane where scores are no numbers
        previous = tl.sum(tl.where(lane == first, token, 0), 0)
        tl.store(out + index * slots + slot, previous)


@triton.jit
def raced(score, delay, heat):
    """Scores at a temperature, less the delays; at 0 the scores alone."""
    cold = heat == 0
    return tl.where(cold, score, score / tl.where(cold, 1.0, heat) - delay)


@triton.jit
def added_scores(pairs, gates, previous, drafts, rank, within, RANK: tl.constexpr):
    """What the draft before adds to the scores of some drafts. within: how much of the rank
    counts."""
    column = tl.arange(0, RANK)
    inside = column < within
    given = tl.load(pairs.predecessor + previous * rank + column, mask=inside, other=0.0).to(
        tl.float32
    )
    gate = tl.load(gates + column, mask=inside, other=0.0).to(tl.float32)
    at = pairs.successor + drafts[:, None] * rank + column[None, :]
    following = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
    return tl.sum(following * (given * gate)[None, :], 1)


@triton.jit
def kept_scores(score, temperature, top_k, min_p):
    """Scores with those outside top-k and below min-p at -inf."""
    above = tl.sum((score[None, :] > score[:, None]).to(tl.int32), 1)
    share = tl.exp((score - tl.max(score, 0)) / tl.where(temperature == 0, 1.0, temperature))
    stays = ((top_k == 0) | (above < top_k)) & (share >= min_p)
    return tl.where(stays, score, float("-inf"))
