"""The gated delta rule in three launches: what each row brings, the recurrence, norms and gates.

The first reads what a layer has kept, and writes what the rows that are replayed and the pass's own
bring, side by side. The second takes some values of a request's head a program, which is one warp,
so that no step waits for another one. One loop runs over all rows, so that a row is computed by the
same instructions whether it is replayed, sure or a draft.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.delta_net import LENGTH_EPS, DeltaHeads, DeltaRows, DeltaState, DeltaWeights
from peagle.ops.triton.launch import begin, overlap

ROWS = 16
"""Rows of a tile before the recurrence."""
VALUES, STAGES = 32, 4
"""Values of a program of the recurrence, and rows that are on their way at once."""
HEADS = 4
"""Heads of a program after it."""


def recur(
    product: Tensor, gates: Tensor, weights: DeltaWeights, layer: DeltaState, rows: DeltaRows
) -> Tensor:
    """As the reference."""
    heads, spans = weights.heads, len(rows.requests)
    drafts = layer.kept.shape[1] - heads.window
    brought = torch.empty(
        len(product) + spans * drafts, heads.inputs, dtype=torch.float32, device=product.device
    )
    about = rows.requests, rows.starts, rows.firsts, rows.counts, rows.accepted
    strides = product.stride(0), gates.stride(0), layer.kept.stride(0)
    sizes = {"DRAFTS": drafts, **_sizes(heads)}
    tiles = triton.cdiv(drafts + rows.most, ROWS)
    _bring[(spans * tiles, triton.cdiv(heads.inputs, heads.key_dim))](
        product,
        gates,
        layer.kept,
        weights.conv,
        weights.decay,
        weights.decay_bias,
        brought,
        *about,
        *strides,
        tiles,
        heads.key_dim**-0.5,
        LENGTH_EPS,
        **sizes,
        ROWS=ROWS,
        **overlap(product),
        num_warps=4,
    )
    given = product.new_empty(len(product), heads.value_width)
    values = min(VALUES, heads.value_dim)
    programs = heads.value_width // values
    _recur[(programs, spans)](
        product,
        gates,
        layer.kept,
        layer.state,
        brought,
        given,
        *about,
        rows.sure,
        *strides,
        **sizes,
        VALUES=values,
        KEPT=triton.next_power_of_2(triton.cdiv(heads.inputs, programs)),
        STAGES=STAGES,
        PLACES=triton.next_power_of_2(heads.window + drafts),
        **overlap(product),
        num_warps=1,
    )
    together = min(HEADS, heads.num_value_heads)
    _norm[(len(product), triton.cdiv(heads.num_value_heads, together))](
        given,
        product,
        weights.norm,
        product.stride(0),
        weights.eps,
        CHANNELS=heads.channels,
        HEADS=heads.num_value_heads,
        TOGETHER=triton.next_power_of_2(together),
        WIDTH=heads.value_dim,
        **overlap(product),
        num_warps=4,
    )
    return given


def _sizes(heads: DeltaHeads) -> dict[str, int]:
    return {
        "CHANNELS": heads.channels,
        "INPUTS": heads.inputs,
        "WINDOW": heads.window,
        "HEADS": heads.num_value_heads,
        "SHARED": heads.num_value_heads // heads.num_key_heads,
        "KEYS": heads.key_dim,
        "WIDTH": heads.value_dim,
    }


@triton.jit
def _span(requests, starts, firsts, counts, accepted, span):
    """A span's table row, whether it has a state, its first row, its rows, and those replayed."""
    request = tl.load(requests + span).to(tl.int64)
    known = tl.load(starts + span) > 0
    first = tl.load(firsts + span).to(tl.int64)
    count = tl.load(counts + span).to(tl.int32)
    replayed = tl.load(accepted + request).to(tl.int32)
    return request, known, first, count, tl.where(known, replayed, 0)


@triton.jit
def _inputs(
    product,
    gates,
    before,
    place,
    channel,
    mask,
    known,
    first,
    replayed,
    product_stride,
    gates_stride,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Some inputs of a span, at places among its kept rows, then the pass's."""
    new = tl.where(place < WINDOW + replayed, -1, first + place - WINDOW - replayed)
    of_pass = tl.where(
        channel < CHANNELS,
        product + new * product_stride + channel,
        gates + new * gates_stride + channel - CHANNELS,
    )
    at = tl.where(new < 0, before + place * INPUTS + channel, of_pass)
    return tl.load(at, mask=mask & ((new >= 0) | known), other=0.0)


@triton.jit
def _bring(
    product,
    gates,
    kept,
    conv,
    decay,
    decay_bias,
    brought,
    requests,
    starts,
    firsts,
    counts,
    accepted,
    product_stride,
    gates_stride,
    kept_stride,
    tiles,
    scale,
    length_eps,
    DRAFTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Queries and keys one long, values, how much is written, and what states are multiplied by."""
    begin(OVERLAP)
    span, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    request, known, first, count, replayed = _span(requests, starts, firsts, counts, accepted, span)
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    if (tile * ROWS >= replayed + count) | (count == 0):
        return
    own = row < replayed + count
    channel = tl.program_id(1) * KEYS + tl.arange(0, KEYS)[None, :]
    before, mask = kept + request * kept_stride, own & (channel < INPUTS)
    is_channel = channel < CHANNELS
    total = tl.zeros([ROWS, KEYS], tl.float32)
    x = tl.zeros([ROWS, KEYS], tl.float32)
    for tap in tl.static_range(WINDOW + 1):
        x = _inputs(
            product,
            gates,
            before,
            row + tap,
            channel,
            mask,
            known,
            first,
            replayed,
            product_stride,
            gates_stride,
            CHANNELS,
            INPUTS,
            WINDOW,
        ).to(tl.float32)
        weight = tl.load(conv + channel * (WINDOW + 1) + tap, mask=is_channel, other=0.0)
        total += x * weight.to(tl.float32)
    mixed = (total / (1 + tl.exp(-total))).to(kept.dtype.element_ty).to(tl.float32)
    length = tl.rsqrt(tl.sum(mixed * mixed, 1) + length_eps)[:, None]
    keys_at: tl.constexpr = (CHANNELS - HEADS * WIDTH) // 2
    result = tl.where(channel < 2 * keys_at, mixed * length, mixed)
    result = tl.where(channel < keys_at, result * scale, result)
    # the last input that was read is the row's own
    head = tl.minimum(tl.maximum(channel - CHANNELS - HEADS, 0), HEADS - 1)
    y = x + tl.load(decay_bias + head).to(tl.float32)
    speed = tl.where(y > 20, y, tl.log(1 + tl.exp(tl.minimum(y, 20.0))))
    speed *= tl.exp(tl.load(decay + head).to(tl.float32))
    gate = tl.where(channel < CHANNELS + HEADS, 1 / (1 + tl.exp(-x)), tl.exp(-speed))
    out = brought + (first + span * DRAFTS + row) * INPUTS + channel
    tl.store(out, tl.where(is_channel, result, gate), mask=mask)


@triton.jit
def _recur(
    product,
    gates,
    kept,
    state,
    brought,
    given,
    requests,
    starts,
    firsts,
    counts,
    accepted,
    sures,
    product_stride,
    gates_stride,
    kept_stride,
    DRAFTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    KEPT: tl.constexpr,
    PLACES: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    program, span = tl.program_id(0), tl.program_id(1)
    request, known, first, count, replayed = _span(requests, starts, firsts, counts, accepted, span)
    if count == 0:
        return
    sure = tl.load(sures + span).to(tl.int32)
    head, part = program // (WIDTH // VALUES), program % (WIDTH // VALUES)
    key_lane, lane = tl.arange(0, KEYS), part * VALUES + tl.arange(0, VALUES)
    at = state + ((request * HEADS + head) * KEYS + key_lane[:, None]) * WIDTH + lane[None, :]
    s = tl.load(at, mask=known & (lane[None, :] >= 0), other=0.0)
    # inputs are kept, each program a share of them, which no other program reads
    channel = program * KEPT + tl.arange(0, KEPT)[None, :]
    place = tl.arange(0, PLACES)[:, None]
    keeps = (place < WINDOW + count - sure) & (channel < INPUTS)
    before = kept + request * kept_stride
    inputs = _inputs(
        product,
        gates,
        before,
        place + replayed + sure,
        channel,
        keeps,
        known,
        first,
        replayed,
        product_stride,
        gates_stride,
        CHANNELS,
        INPUTS,
        WINDOW,
    )
    tl.debug_barrier()
    tl.store(before + place * INPUTS + channel, inputs, mask=keeps)

    keys_at: tl.constexpr = (CHANNELS - HEADS * WIDTH) // 2
    row = brought + (first + span * DRAFTS) * INPUTS
    query_at = row + head // SHARED * KEYS + key_lane
    value_at = row + 2 * keys_at + head * WIDTH + lane
    gate_at = row + CHANNELS + head
    out = given + (first - replayed) * HEADS * WIDTH + head * WIDTH + lane
    # rows are on their way while those before them are computed
    for i in tl.range(0, replayed + count, num_stages=STAGES):
        query, key = tl.load(query_at + i * INPUTS), tl.load(query_at + keys_at + i * INPUTS)
        value, write = tl.load(value_at + i * INPUTS), tl.load(gate_at + i * INPUTS)
        factor = tl.load(gate_at + HEADS + i * INPUTS)
        s = s * factor
        change = (value - tl.sum(s * key[:, None], 0)) * write
        s += key[:, None] * change[None, :]
        if i == replayed + sure - 1:
            tl.store(at, s)
        result = tl.sum(s * query[:, None], 0)
        tl.store(out + i * HEADS * WIDTH, result, mask=(i >= replayed) & (lane >= 0))


@triton.jit
def _norm(
    given,
    product,
    weight,
    product_stride,
    eps,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Heads normed, and times their gates, in their place."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)[:, None]
    lane = tl.arange(0, WIDTH)[None, :]
    mask = (head < HEADS) & (lane >= 0)
    at = given + (row * HEADS + head) * WIDTH + lane
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    x = x.to(given.dtype.element_ty).to(tl.float32) * tl.load(weight + lane).to(tl.float32)
    x = x.to(given.dtype.element_ty).to(tl.float32)
    z_at = product + row * product_stride + CHANNELS + head * WIDTH + lane
    z = tl.load(z_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, x * (z / (1 + tl.exp(-z))), mask=mask)
