"""Drafts drawn among candidates, and the count of which factor was right, in a launch each.

Of a request's slots each needs the one before only where pairs count: then one program walks along
them, and of all pairs scores those with the draft that it took.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.candidates import Candidates, Pairs
from peagle.ops.drafts import KEPT
from peagle.ops.race import Race
from peagle.ops.triton.sampling import arrival_time, row_key


def draw_drafts(
    found: Candidates, pairs: Pairs | None, race: Race, depth: int
) -> tuple[Tensor, Tensor]:
    """As the reference. Returns tokens and alternatives."""
    requests, slots, count = found.scores.shape
    factors, sampling = len(race.factors), race.sampling
    out = torch.empty(requests, slots, dtype=torch.int64, device=found.scores.device)
    others = torch.empty(requests, slots, factors, dtype=torch.int64, device=out.device)
    sides, rank, stride = pair_sides(found, pairs)
    _draw[(requests, slots if pairs is None else 1)](
        found.scores, found.ids, found.tokens, *sides, sampling.temperature, sampling.top_k,
        sampling.min_p, sampling.seeds, race.newest, race.requests, race.factors, race.chosen,
        out, others, slots, depth, count, factors, rank, stride,
        COUNT=triton.next_power_of_2(count), FACTORS=triton.next_power_of_2(factors),
        RANK=triton.next_power_of_2(rank), PAIRS=pairs is not None,
        num_warps=1 if pairs is None else 4,
    )  # fmt: skip
    return out, others


def pair_sides(
    found: Candidates, pairs: Pairs | None
) -> tuple[tuple[Tensor, Tensor, Tensor], int, int]:
    """What kernels read of pairs, their rank and the gates' stride; anything where none count."""
    if pairs is None:
        return (found.scores,) * 3, 1, 1
    sides = pairs.predecessor, pairs.successor, pairs.gates
    return sides, pairs.gates.shape[-1], pairs.gates.stride(1)


def record(
    right: Tensor, best: Tensor, drafts: Tensor, alternatives: Tensor, chosen: Tensor
) -> None:
    """As the reference."""
    requests, depths, factors = alternatives.shape
    _record[(depths,)](
        right, best, drafts, alternatives, chosen, requests, depths, factors, math.log2(KEPT),
        REQUESTS=triton.next_power_of_2(requests), DEPTHS=triton.next_power_of_2(depths),
        FACTORS=triton.next_power_of_2(factors),
    )  # fmt: skip


@triton.jit(do_not_specialize=["depth"])
def _draw(
    scores,
    ids,
    tokens,
    predecessor,
    successor,
    gates,
    temperatures,
    top_ks,
    min_ps,
    seeds,
    newest,
    requests,
    factors,
    chosen,
    out,
    others,
    slots,
    depth,
    count,
    most,
    rank,
    gates_stride,
    COUNT: tl.constexpr,
    FACTORS: tl.constexpr,
    RANK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    index, begin = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(requests + index)
    temperature = tl.load(temperatures + request)
    top_k, min_p = tl.load(top_ks + request), tl.load(min_ps + request)
    seed, position = tl.load(seeds + request), tl.load(newest + request) + 1 + depth
    lane, factor = tl.arange(0, COUNT), tl.arange(0, FACTORS)
    inside, known = lane < count, factor < most
    heat = temperature * tl.load(factors + factor, mask=known, other=0.0)
    previous = tl.zeros([], tl.int64)
    for slot in range(begin, slots if PAIRS else begin + 1):
        at = (index * slots + slot) * count + lane
        score = tl.load(scores + at, mask=inside, other=float("-inf"))
        token = tl.load(tokens + at, mask=inside, other=0)
        if PAIRS:
            draft = tl.load(ids + at, mask=inside, other=0)
            gate = gates + (index * slots + slot) * gates_stride
            within = tl.where(slot > 0, rank, 0)  # the first slot has read the token before it
            score += added_scores(predecessor, successor, gate, previous, draft, rank, within, RANK)
        score = kept_scores(score, temperature, top_k, min_p)
        delay = tl.log(arrival_time(row_key(seed, position + slot), token))
        cold = (heat == 0)[:, None]
        value = score[None, :] / tl.where(cold, 1.0, heat[:, None])
        value = tl.where(cold, value, value - delay[None, :])
        first = value == tl.max(value, 1)[:, None]
        first = tl.min(tl.where(first, lane[None, :], COUNT), 1)
        first = tl.where(first < COUNT, first, 0)[:, None]  # none where scores are no numbers
        arrived = tl.sum(tl.where(lane[None, :] == first, token[None, :], 0), 1)
        drafted = factor == tl.load(chosen + depth + slot)
        previous = tl.sum(tl.where(drafted, arrived, 0), 0)
        at = index * slots + slot
        tl.store(out + at, previous)
        shown = tl.where(temperature == 0, -1, arrived)
        tl.store(others + at * most + factor, shown, mask=known)


@triton.jit
def added_scores(predecessor, successor, gates, previous, drafts, rank, within, RANK: tl.constexpr):
    """What the draft before adds to the scores of some drafts. within: of the rank that counts."""
    column = tl.arange(0, RANK)
    inside = column < within
    given = tl.load(predecessor + previous * rank + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + column, mask=inside, other=0.0).to(tl.float32)
    at = successor + drafts[:, None] * rank + column[None, :]
    following = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
    return tl.sum(following * (given * gate)[None, :], 1)


@triton.jit
def kept_scores(score, temperature, top_k, min_p):
    """Scores with those outside top-k and below min-p at -inf."""
    above = tl.sum((score[None, :] > score[:, None]).to(tl.int32), 1)
    share = tl.exp((score - tl.max(score, 0)) / tl.where(temperature == 0, 1.0, temperature))
    stays = ((top_k == 0) | (above < top_k)) & (share >= min_p)
    return tl.where(stays, score, float("-inf"))


@triton.jit
def _record(
    right,
    best,
    drafts,
    alternatives,
    chosen,
    requests,
    depths,
    most,
    kept,
    REQUESTS: tl.constexpr,
    DEPTHS: tl.constexpr,
    FACTORS: tl.constexpr,
):
    depth = tl.program_id(0)
    request, factor = tl.arange(0, REQUESTS), tl.arange(0, FACTORS)
    there, step = request < requests, tl.arange(0, DEPTHS)
    before = there[:, None] & (step < depth)[None, :]
    ours = request[:, None] * depths + step[None, :]
    drafted = tl.load(drafts + ours, mask=before, other=0)
    theirs = ours + request[:, None]
    missed = drafted != tl.load(chosen + theirs, mask=before, other=0)
    reached = tl.max(missed.to(tl.int32), 1) == 0
    at = (request * depths + depth) * most
    inside = there[:, None] & (factor < most)[None, :]
    other = tl.load(alternatives + at[:, None] + factor[None, :], mask=inside, other=-1)
    known = inside & (reached & (tl.max(other, 1) >= 0))[:, None]
    token = tl.load(chosen + request * (depths + 1) + depth, mask=there, other=-1)
    hits = tl.sum((known & (other == token[:, None])).to(tl.float32), 0)
    counts = right + depth * most + factor
    fades = tl.exp2(tl.sum(known.to(tl.float32), 0) * kept)
    count = tl.load(counts, mask=factor < most, other=-1.0) * fades + hits
    tl.store(counts, count, mask=factor < most)
    first = tl.min(tl.where(count == tl.max(count, 0), factor, FACTORS), 0)
    tl.store(best + depth, first.to(tl.int64))
