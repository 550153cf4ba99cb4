"""Contexts are divided among programs on the device, once a pass: long ones into more parts.

Few requests get as many parts as can run at once, each as small as that allows. Of many requests,
whose programs fill the GPU anyway, only contexts far longer than a fair share are divided: one that
a single program reads alone would delay everyone's next layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.cached_attention import PassRows
from peagle.ops.triton.launch import begin, overlap

MOST_PARTS = 16
"""Most parts of a context: to merge them takes longer with each."""
SLACK = 2
"""Fair shares that a part may hold where requests are many: each part costs a start and an end."""
STEPS = tl.constexpr(16)
"""Steps of a bisection: a context has fewer tiles than two to this power."""


def divide(rows: PassRows, kv_heads: int, keys: int, least: int, room: int) -> Tensor:
    """[items, 3] int32: a request, the index of a part, and its number of parts; -1 after the last.

    keys: keys of a tile, the first of which is the rows' own; least: fewest tiles of a part; room:
    programs that run at once, one for each item and key-value head.
    """
    requests = len(rows.requests)
    items = most_items(requests, kv_heads, room)
    padded = triton.next_power_of_2(requests)
    shares = torch.empty(items, 3, dtype=torch.int32, device=rows.starts.device)
    _divide[(1,)](
        rows.starts,
        rows.counts,
        rows.limits,
        rows.requests,
        shares,
        requests,
        items,
        kv_heads,
        room // SLACK,
        least,
        KEYS=keys,
        MOST=MOST_PARTS,
        FEW=are_few(requests, kv_heads, room),
        REQUESTS=padded,
        ITEMS=triton.next_power_of_2(items),
        **overlap(rows.starts),
        num_warps=max(1, min(8, padded // 64)),
    )
    return shares


def are_few(requests: int, kv_heads: int, room: int) -> bool:
    """Whether there is room for two parts of every context."""
    return 2 * requests * kv_heads <= room


def most_items(requests: int, kv_heads: int, room: int) -> int:
    """Most parts of all contexts together."""
    if are_few(requests, kv_heads, room):
        return min(room // kv_heads, MOST_PARTS * requests)
    return requests + room // SLACK // kv_heads


@triton.jit(do_not_specialize=["requests_count", "items"])
def _divide(
    starts,
    counts,
    limits,
    requests,
    shares,
    requests_count,
    items,
    kv_heads,
    spread,
    least,
    KEYS: tl.constexpr,
    MOST: tl.constexpr,
    FEW: tl.constexpr,
    REQUESTS: tl.constexpr,
    ITEMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    request = tl.arange(0, REQUESTS)
    there = request < requests_count
    start = tl.load(starts + request, mask=there, other=0).to(tl.int32)
    stop = start + tl.load(counts + request, mask=there, other=0).to(tl.int32)
    limit = tl.load(limits + tl.load(requests + request, mask=there, other=0), mask=there, other=0)
    older = tl.minimum(start, tl.minimum(stop, limit.to(tl.int32)))
    tiles = tl.where(there, 1 + tl.cdiv(older, KEYS), 0)
    longest = tl.max(tiles, 0)
    share = tl.maximum(least, tl.cdiv(longest, MOST))
    if FEW:
        # three requests of 8, 3 and 1 tiles and room for 6 items: the smallest share that fits is 3
        #
        #   request 0   ▇▇▇│▇▇▇│▇▇       with a share of 2 there would be 4 + 2 + 1 parts
        #   request 1   ▇▇▇
        #   request 2   ▇                `enough` always fits, what is below `share` does not
        enough = tl.maximum(share, longest)
        for _ in tl.static_range(STEPS):
            middle = (share + enough) // 2
            fits = tl.sum(tl.cdiv(tiles, middle), 0) <= items
            enough = tl.where(fits, middle, enough)
            share = tl.where(fits, share, middle + 1)
    else:
        # then there are at most `most_items`: whole parts fill `spread`, and each request begins
        # one more
        share = tl.maximum(share, tl.cdiv(kv_heads * tl.sum(tiles, 0), spread))
    parts = tl.cdiv(tiles, share)
    ends = tl.cumsum(parts, 0)
    part = tl.arange(0, MOST)[None, :]
    mine = part < parts[:, None]
    at = shares + ((ends - parts)[:, None] + part) * 3
    tl.store(at, tl.broadcast_to(request[:, None], [REQUESTS, MOST]), mask=mine)
    tl.store(at + 1, tl.broadcast_to(part, [REQUESTS, MOST]), mask=mine)
    tl.store(at + 2, tl.broadcast_to(parts[:, None], [REQUESTS, MOST]), mask=mine)
    item = tl.arange(0, ITEMS)
    tl.store(shares + item * 3, -1, mask=(item >= tl.sum(parts, 0)) & (item < items))
