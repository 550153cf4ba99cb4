"""The gated delta rule in three launches: what each row brings, the recurrence, norms and gates.

The first reads what a layer has kept, and writes what the rows that are replayed and the pass's own
bring, side by side. The second takes some values of a request's head a program, which is one warp,
so that no step waits for another one: fewer values where there would be too few programs. One loop
runs over all rows, so that a row is computed by the same instructions whether it is replayed, sure
or a draft, and a warp's lanes share keys alike however many values it has.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.delta_net import LENGTH_EPS, DeltaHeads, DeltaRows, DeltaState, DeltaWeights
from peagle.ops.triton.launch import begin, overlap

ROWS = tl.constexpr(2)
"""Rows of a tile before the recurrence."""
VALUES, STAGES, PROGRAMS = 32, tl.constexpr(4), 384
"""Most values of a program of the recurrence, rows that are on their way at once, and the programs
below which each has half of those values."""
LANES = tl.constexpr(4)
"""Lanes of a warp that share the keys of a value; there are eight such groups."""
HEADS = 4
"""Heads of a program after the recurrence."""
EPS = tl.constexpr(LENGTH_EPS)


class Inputs(NamedTuple):
    """What a layer's rows are made of: products, gates, and the inputs that are kept; or the
    strides of these."""

    product: Tensor | int
    gates: Tensor | int
    kept: Tensor | int


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes that kernels are compiled with; as in `DeltaHeads`."""

    drafts: int
    """Most drafts in a pass."""
    channels: int
    inputs: int
    window: int
    heads: int
    shared: int
    """Heads that share a key head."""
    keys: int
    width: int
    """The width of a value."""

    @classmethod
    def of(cls, heads: DeltaHeads, drafts: int) -> "DeltaSizes":
        """The sizes of a layer."""
        count, sizes = heads.num_value_heads, (heads.channels, heads.inputs, heads.window)
        shared = count // heads.num_key_heads
        return cls(drafts, *sizes, count, shared, heads.key_dim, heads.value_dim)


def recur(
    product: Tensor, gates: Tensor, weights: DeltaWeights, layer: DeltaState, rows: DeltaRows
) -> Tensor:
    """As the reference."""
    heads, count = weights.heads, len(rows.requests)
    sizes = DeltaSizes.of(heads, layer.kept.shape[1] - heads.window)
    # each span may replay as many rows as there may be drafts, so `brought` has room for them:
    #
    #   span 0: replayed, its rows │ room left │ span 1: replayed, its rows │ room left │ ...
    #   ^ row 0                                ^ drafts + its first row in the pass
    room = len(product) + count * sizes.drafts
    brought = product.new_empty(room, heads.inputs, dtype=torch.float32)
    inputs = Inputs(product, gates, layer.kept)
    strides = Inputs(product.stride(0), gates.stride(0), layer.kept.stride(0))
    spans = rows._replace(most=0)  # no kernel is compiled for it
    # a tile is of one span, and the last one of a span may be cut short
    tiles = triton.cdiv(room + count * (ROWS.value - 1), ROWS.value)
    _bring[(tiles, triton.cdiv(heads.inputs, heads.key_dim))](
        inputs,
        weights.conv,
        weights.decay,
        weights.decay_bias,
        brought,
        spans,
        strides,
        count,
        D=sizes,
        SPANS=max(32, triton.next_power_of_2(count)),
        **overlap(product),
        num_warps=1,
    )
    given = product.new_empty(len(product), heads.value_width)
    # as many spans as there would be if all were as long as the longest
    values, long_spans = min(VALUES, heads.value_dim), max(len(product) // rows.most, 1)
    if values == VALUES and long_spans * heads.value_width // values < PROGRAMS:
        values //= 2
    programs = heads.value_width // values
    _recur[(programs, count)](
        inputs,
        layer.state,
        brought,
        given,
        spans,
        strides,
        D=sizes,
        VALUES=values,
        KEPT=triton.next_power_of_2(triton.cdiv(heads.inputs, programs)),
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
        D=sizes,
        HEADS=triton.next_power_of_2(together),
        **overlap(product),
        num_warps=4,
    )
    return given


@triton.jit
def _span(spans, span):
    """A span's table row, whether it has a state, its first row, its rows, and those replayed."""
    request = tl.load(spans.requests + span).to(tl.int64)
    known = tl.load(spans.starts + span) > 0
    first = tl.load(spans.firsts + span).to(tl.int64)
    count = tl.load(spans.counts + span).to(tl.int32)
    replayed = tl.load(spans.accepted + request).to(tl.int32)
    return request, known, first, count, tl.where(known, replayed, 0)


@triton.jit
def _inputs(inputs, strides, before, place, channel, mask, known, first, replayed, D: tl.constexpr):
    """Some inputs of a span, at places among its kept rows, behind which come the pass's."""
    new = tl.where(place < D.window + replayed, -1, first + place - D.window - replayed)
    of_pass = tl.where(
        channel < D.channels,
        inputs.product + new * strides.product + channel,
        inputs.gates + new * strides.gates + channel - D.channels,
    )
    at = tl.where(new < 0, before + place * D.inputs + channel, of_pass)
    return tl.load(at, mask=mask & ((new >= 0) | known), other=0.0)


@triton.jit(do_not_specialize=["num_spans"])
def _bring(
    inputs,
    conv,
    decay,
    decay_bias,
    brought,
    spans,
    strides,
    num_spans,
    D: tl.constexpr,
    SPANS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Queries and keys one long, values, how much is written, and what states are multiplied by."""
    begin(OVERLAP)
    at = tl.arange(0, SPANS)
    counts = tl.load(spans.counts + at, mask=at < num_spans, other=0).to(tl.int32)
    # a span's tiles have room for all drafts that may be replayed; the next span's follow
    ends = tl.cumsum(tl.where(counts > 0, tl.cdiv(counts + D.drafts, ROWS), 0))
    passed = ends <= tl.program_id(0)
    span, tile = tl.sum(passed.to(tl.int32)), tl.program_id(0) - tl.max(tl.where(passed, ends, 0))
    if span >= num_spans:
        return
    request, known, first, count, replayed = _span(spans, span)
    if tile * ROWS >= replayed + count:  # fewer drafts are replayed than there is room for
        return
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    own = row < replayed + count
    channel = tl.program_id(1) * D.keys + tl.arange(0, D.keys)[None, :]
    before, mask = inputs.kept + request * strides.kept, own & (channel < D.inputs)
    is_channel = channel < D.channels
    keys: tl.constexpr = D.keys
    total = tl.zeros([ROWS, keys], tl.float32)
    x = tl.zeros([ROWS, keys], tl.float32)
    for tap in tl.static_range(D.window + 1):
        x = _inputs(
            inputs, strides, before, row + tap, channel, mask, known, first, replayed, D
        ).to(tl.float32)
        weight = tl.load(conv + channel * (D.window + 1) + tap, mask=is_channel, other=0.0)
        total += x * weight.to(tl.float32)
    mixed = (total / (1 + tl.exp(-total))).to(inputs.kept.dtype.element_ty).to(tl.float32)
    length = tl.rsqrt(tl.sum(mixed * mixed, 1) + EPS)[:, None]
    keys_at: tl.constexpr = (D.channels - D.heads * D.width) // 2
    result = tl.where(channel < 2 * keys_at, mixed * length, mixed)
    result = tl.where(channel < keys_at, result * D.keys**-0.5, result)
    # the last input that was read is the row's own
    head = tl.minimum(tl.maximum(channel - D.channels - D.heads, 0), D.heads - 1)
    y = x + tl.load(decay_bias + head).to(tl.float32)
    # softplus, by torch's threshold: from there on it is y in float32
    speed = tl.where(y > 20, y, tl.log(1 + tl.exp(tl.minimum(y, 20.0))))
    speed *= tl.exp(tl.load(decay + head).to(tl.float32))
    gate = tl.where(channel < D.channels + D.heads, 1 / (1 + tl.exp(-x)), tl.exp(-speed))
    out = brought + (first + span * D.drafts + row) * D.inputs + channel
    tl.store(out, tl.where(is_channel, result, gate), mask=mask)


@triton.jit
def _recur(
    inputs,
    state,
    brought,
    given,
    spans,
    strides,
    D: tl.constexpr,
    VALUES: tl.constexpr,
    KEPT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    program, span = tl.program_id(0), tl.program_id(1)
    request, known, first, count, replayed = _span(spans, span)
    if count == 0:
        return
    sure = tl.load(spans.sure + span).to(tl.int32)
    head, part = program // (D.width // VALUES), program % (D.width // VALUES)
    # as many lanes share a value's keys, however many values there are, so that sums have one order
    lane = part * VALUES + tl.max_contiguous(tl.arange(0, VALUES), VALUES // (32 // LANES))
    key_lane = tl.arange(0, D.keys)
    of_key = (request * D.heads + head) * D.keys + _dealt(key_lane, D)[:, None]
    at = state + of_key * D.width + lane[None, :]
    s = tl.load(at, mask=known & (lane[None, :] >= 0), other=0.0)
    # inputs are kept, each program a share of them, which no other program reads
    channel = program * KEPT + tl.arange(0, KEPT)[None, :]
    places: tl.constexpr = triton.next_power_of_2(D.window + D.drafts)
    place = tl.arange(0, places)[:, None]
    keeps = (place < D.window + count - sure) & (channel < D.inputs)
    before = inputs.kept + request * strides.kept
    at_first = place + replayed + sure
    taken = _inputs(inputs, strides, before, at_first, channel, keeps, known, first, replayed, D)
    # kept rows move towards the first one in the same memory: all are read before one is written
    tl.debug_barrier()
    tl.store(before + place * D.inputs + channel, taken, mask=keeps)

    keys_at: tl.constexpr = (D.channels - D.heads * D.width) // 2
    row = brought + (first + span * D.drafts) * D.inputs
    query_at = row + head // D.shared * D.keys + key_lane
    value_at = row + 2 * keys_at + head * D.width + lane
    gate_at = row + D.channels + head
    out = given + (first - replayed) * D.heads * D.width + head * D.width + lane
    # rows are on their way while those before them are computed
    for i in tl.range(0, replayed + count, num_stages=STAGES):
        query, key = tl.load(query_at + i * D.inputs), tl.load(query_at + keys_at + i * D.inputs)
        value, write = tl.load(value_at + i * D.inputs), tl.load(gate_at + i * D.inputs)
        factor, both = tl.load(gate_at + D.heads + i * D.inputs), tl.sum(query * key, 0)
        query, key = _dealt(query, D)[:, None], _dealt(key, D)[:, None]
        # both sums are of the state before the row, so that a row waits once
        change = (value - factor * tl.sum(s * key, 0)) * write
        result = factor * tl.sum(s * query, 0) + both * change
        s = tl.fma(key, change[None, :], s * factor)
        # behind it come drafts, whose state stays in registers
        if i == replayed + sure - 1:
            tl.store(at, s)
        tl.store(out + i * D.heads * D.width, result, mask=(i >= replayed) & (lane >= 0))


@triton.jit
def _dealt(x, D: tl.constexpr):
    """Keys so ordered that of `LANES` lanes, which take them in turn, each gets four neighbours,
    which it reads at once."""
    x = tl.reshape(x, [D.keys // (4 * LANES), LANES, 4])
    return tl.reshape(tl.permute(x, (0, 2, 1)), [D.keys])


@triton.jit
def _norm(
    given, product, weight, stride, eps, D: tl.constexpr, HEADS: tl.constexpr, OVERLAP: tl.constexpr
):
    """Heads normed, and times their gates, in their place."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, D.width)[None, :]
    mask = (head < D.heads) & (lane >= 0)
    at = given + (row * D.heads + head) * D.width + lane
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / D.width + eps)[:, None]
    # rounded where the reference rounds
    x = x.to(given.dtype.element_ty).to(tl.float32) * tl.load(weight + lane).to(tl.float32)
    x = x.to(given.dtype.element_ty).to(tl.float32)
    z_at = product + row * stride + D.channels + head * D.width + lane
    z = tl.load(z_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, x * (z / (1 + tl.exp(-z))), mask=mask)
