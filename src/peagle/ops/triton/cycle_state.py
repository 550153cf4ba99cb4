"""Expansion of accepted tokens into a pass's rows, and acceptance, each in one launch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.acceptance import Path
from peagle.ops.cached_attention import PassRows
from peagle.ops.cycle_state import CycleState, DraftInputs, FirstNorms
from peagle.ops.norm import RMSNorm


class Places(NamedTuple):
    """What places rows; as in `PassRows`."""

    starts: Tensor
    firsts: Tensor
    counts: Tensor
    positions: Tensor
    writes: Tensor

    @classmethod
    def empty(cls, requests: Tensor, rows: int) -> "Places":
        """Places of so many rows, yet to be written."""
        starts, firsts, counts = (torch.empty_like(requests) for _ in range(3))
        return cls(starts, firsts, counts, requests.new_empty(rows), requests.new_empty(rows))


def draft_inputs(
    state: CycleState, requests: Tensor, pending: int, masks: int, norms: FirstNorms
) -> DraftInputs:
    """As the reference."""
    batch, hidden = len(requests), norms.embedding.shape[1]
    most = batch * (pending + masks)
    x = norms.embedding.new_empty(most, 2 * hidden)
    stream = norms.embedding.new_empty(most, hidden)
    places = Places.empty(requests, most)
    reads = requests.new_empty(batch, masks + 1, dtype=torch.int64)
    _draft_inputs[(most,)](
        requests,
        state,
        norms._replace(before_residual=0),  # the interpreter takes no bool in a group
        x,
        stream,
        places,
        reads,
        state.slots.stride(0),
        batch,
        masks,
        state.emitted.shape[1],
        hidden,
        BATCH=triton.next_power_of_2(batch),
        HIDDEN=triton.next_power_of_2(hidden),
        READS=triton.next_power_of_2(masks + 1),
        BEFORE=norms.before_residual,
        num_warps=8,
    )
    rows = PassRows(state.slots, state.limits, requests, *places, pending + masks)
    return DraftInputs(rows, x, stream, reads)


def verify_inputs(
    state: CycleState, requests: Tensor, drafts: Tensor, embedding: Tensor, norm: RMSNorm
) -> tuple[PassRows, Tensor, Tensor]:
    """As the reference."""
    batch, count, hidden = len(requests), drafts.shape[1] + 1, embedding.shape[1]
    x, scaled = (embedding.new_empty(batch * count, hidden) for _ in range(2))
    places = Places.empty(requests, batch * count)
    _verify_inputs[(batch * count,)](
        requests,
        state,
        drafts,
        embedding,
        norm.weight,
        x,
        scaled,
        places,
        state.slots.stride(0),
        count,
        state.emitted.shape[1],
        hidden,
        norm.eps,
        HIDDEN=triton.next_power_of_2(hidden),
        num_warps=8,
    )
    return PassRows(state.slots, state.limits, requests, *places, count), x, scaled


def advance(state: CycleState, requests: Tensor, path: Path, features: Tensor | None) -> None:
    """As the reference."""
    batch, count = path.chosen.shape
    hidden = 1 if features is None else features.shape[1]
    _advance[(batch, count)](
        requests,
        path.drafts,
        path.chosen,
        features,
        state,
        state.emitted.shape[1],
        state.results.shape[1],
        hidden,
        COUNT=count,
        WIDTH=triton.next_power_of_2(count),
        HIDDEN=triton.next_power_of_2(hidden),
        num_warps=4,
    )


@triton.jit
def _scale(x, eps, hidden):
    return tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)


@triton.jit
def _place(row, mine, index, place, start, count, state, places, slots_stride):
    """Note a row's position and its cache slot, and with a request's first row where all are."""
    position = start + place
    kept = position < tl.load(state.limits + mine)
    slot = tl.load(state.slots + mine * slots_stride + position, mask=kept, other=-1)
    tl.store(places.positions + row, position)
    tl.store(places.writes + row, slot)
    if place == 0:
        tl.store(places.starts + index, start)
        tl.store(places.firsts + index, row.to(tl.int64))
        tl.store(places.counts + index, tl.cast(count, tl.int64))


@triton.jit
def _draft_inputs(
    requests,
    state,
    norms,
    x,
    stream,
    places,
    reads,
    slots_stride,
    batch,
    masks,
    width,
    hidden,
    BATCH: tl.constexpr,
    HIDDEN: tl.constexpr,
    READS: tl.constexpr,
    BEFORE: tl.constexpr,
):
    row = tl.program_id(0)
    member = tl.arange(0, BATCH)
    there = member < batch
    table_rows = tl.load(requests + member, mask=there, other=0)
    # where a request's rows begin depends on what all before it have accepted, which the device
    # alone knows: every program adds that up
    count = tl.load(state.pending + table_rows, mask=there, other=0).to(tl.int32)
    rows = tl.where(there, count + masks, 0)
    ends = tl.cumsum(rows, 0)
    all_rows = tl.sum(rows, 0)
    # a graph has rows for the most that requests may bring; what is left over is written nowhere
    if row >= all_rows:
        tl.store(places.positions + row, tl.zeros([], tl.int64))
        tl.store(places.writes + row, tl.full([], -1, tl.int64))
        return
    index = tl.sum((ends <= row).to(tl.int32), 0)
    chosen = member == index
    mine = tl.sum(tl.where(chosen, table_rows, 0), 0).to(tl.int64)
    known = tl.sum(tl.where(chosen, count, 0), 0)
    first = tl.sum(tl.where(chosen, ends - rows, 0), 0)
    place = row - first
    start = tl.load(state.computed + mine) - known
    _place(row, mine, index, place, start, known + masks, state, places, slots_stride)
    if place == 0:
        read = tl.arange(0, READS)
        at = reads + index * (masks + 1) + read
        tl.store(at, (first + known - 1 + read).to(tl.int64), mask=read <= masks)
    real = place < known
    column = tl.arange(0, HIDDEN)
    inside = column < hidden
    token = tl.load(state.emitted + mine * width + place, mask=real, other=norms.mask_token)
    word = tl.load(norms.embedding + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    seen = tl.load(
        state.features + (mine * width + place) * hidden + column, mask=inside & real, other=0.0
    ).to(tl.float32)
    masked = tl.load(norms.mask_feature + column, mask=inside & (place >= known), other=0.0)
    # one of the two is zero
    feature = seen + masked.to(tl.float32)
    left = tl.load(norms.input_weight + column, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(norms.hidden_weight + column, mask=inside, other=0.0).to(tl.float32)
    kind = x.dtype.element_ty
    at = row.to(tl.int64) * 2 * hidden + column
    scaled = (feature * _scale(feature, norms.eps, hidden) * right).to(kind)
    tl.store(x + at, (word * _scale(word, norms.eps, hidden) * left).to(kind), mask=inside)
    tl.store(x + at + hidden, scaled, mask=inside)
    at = row.to(tl.int64) * hidden + column
    if BEFORE:
        tl.store(stream + at, scaled, mask=inside)
    else:
        tl.store(stream + at, feature.to(kind), mask=inside)


@triton.jit
def _verify_inputs(
    requests,
    state,
    drafts,
    embedding,
    weight,
    x,
    scaled,
    places,
    slots_stride,
    count,
    width,
    hidden,
    eps,
    HIDDEN: tl.constexpr,
):
    row = tl.program_id(0)
    index, place = row // count, row % count
    mine = tl.load(requests + index).to(tl.int64)
    last = tl.load(state.pending + mine) - 1
    start = tl.load(state.computed + mine)
    _place(row, mine, index, place, start, count, state, places, slots_stride)
    first = tl.load(state.emitted + mine * width + last, mask=place == 0, other=0)
    later = tl.load(drafts + index * (count - 1) + place - 1, mask=place > 0, other=0)
    # one of the two is 0
    token = first + later
    column = tl.arange(0, HIDDEN)
    inside = column < hidden
    word = tl.load(embedding + token * hidden + column, mask=inside, other=0.0)
    at = row.to(tl.int64) * hidden + column
    tl.store(x + at, word, mask=inside)
    value = word.to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value = value * _scale(value, eps, hidden) * factor
    tl.store(scaled + at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _advance(
    requests,
    drafts,
    chosen,
    features,
    state,
    width,
    results_width,
    hidden,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    index, place = tl.program_id(0), tl.program_id(1)
    mine = tl.load(requests + index).to(tl.int64)
    first = tl.zeros([], tl.int64)
    most = tl.load(state.ks + mine).to(tl.int32)
    if features is not None:
        # with drafts another program of this request may have changed `pending` already
        if COUNT == 1:  # without drafts, the drafter still has to see those before
            first = tl.where(most > 0, tl.load(state.pending + mine), 0).to(tl.int64)
        column = tl.arange(0, HIDDEN)
        inside = column < hidden
        at = (index * COUNT + place).to(tl.int64) * hidden + column
        value = tl.load(features + at, mask=inside)
        tl.store(
            state.features + (mine * width + first + place) * hidden + column, value, mask=inside
        )
    if place > 0:
        return
    step = tl.arange(0, WIDTH)
    taken = tl.load(chosen + index * COUNT + step, mask=step < COUNT, other=-1)
    proposed = tl.load(drafts + index * (COUNT - 1) + step, mask=step < COUNT - 1, other=-2)
    # the first disagreement; past the last draft there always is one
    agreed = tl.min(tl.where((proposed != taken) | (step >= COUNT - 1), step, WIDTH), 0)
    accepted = tl.minimum(agreed, most)
    shown = step <= accepted
    tl.store(state.results + mine * results_width, accepted.to(tl.int64))
    tl.store(state.results + mine * results_width + 1 + step, taken, mask=shown)
    # -1, of a row with NaN, has no embedding
    tl.store(state.emitted + mine * width + first + step, tl.maximum(taken, 0), mask=shown)
    # the row that pads the batch comes again and again: its position must not grow
    lives = tl.load(state.limits + mine) > 0
    tl.store(state.pending + mine, tl.where(lives, first + accepted + 1, 1).to(tl.int64))
    tl.store(
        state.computed + mine, tl.where(lives, tl.load(state.computed + mine) + accepted + 1, 1)
    )
