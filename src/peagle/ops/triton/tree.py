"""Trees of drafts: grown in three launches, walked and straightened in one each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.acceptance import Path
from peagle.ops.candidates import Candidates, Pairs
from peagle.ops.cycle_state import CycleState
from peagle.ops.draft import Draft, Tree
from peagle.ops.race import Race
from peagle.ops.triton.draft import NONE, added_scores, kept_scores, pair_sides, raced
from peagle.ops.triton.penalties import are_some, rates_of
from peagle.ops.triton.sampling import arrival_time, row_key

HELD = tl.constexpr(1024)
"""Numbers of a row that a program moves at once."""


def find_unbranched(state: CycleState, requests: Tensor, nodes: int) -> Tensor:
    """As the reference."""
    unbranched = torch.empty_like(requests)
    known = state.penalties.rates, state.computed, state.limits
    _unbranched[(len(requests),)](*known, requests, unbranched, nodes, num_warps=1)
    return unbranched


def grow(
    found: Candidates, pairs: Pairs | None, race: Race, nodes: int, unbranched: Tensor
) -> Draft:
    """As the reference."""
    requests, slots, count = found.scores.shape
    tokens, parents = (found.ids.new_empty(requests, nodes) for _ in range(2))
    depths = found.ids.new_empty(requests, nodes + 1)
    ancestors = torch.empty(requests, nodes + 1, dtype=torch.int32, device=depths.device)
    tree = Tree(parents, depths, ancestors, slots)
    befores = 1 if pairs is None else count
    shares = _log_shares(found, pairs, race, befores)
    _grow[(requests,)](
        shares, found.tokens, unbranched, tokens, tree, befores, count, nodes,
        COUNT=triton.next_power_of_2(count), ROWS=triton.next_power_of_2(nodes + 1), num_warps=1,
    )  # fmt: skip
    return Draft(tokens, tree)


def _log_shares(found: Candidates, pairs: Pairs | None, race: Race, befores: int) -> Tensor:
    """The reference's log shares, by programs that need not wait for one another.

    Returns [requests, slots, candidates before, candidates]; in slot 0 only the first candidate
    before is filled.
    """
    requests, slots, count = found.scores.shape
    out = found.scores.new_empty(requests, slots, befores, count, dtype=torch.float32)
    sides, rank = pair_sides(pairs)
    _log_share[(requests, slots, befores)](
        found, sides, race, out, slots, count,
        COUNT=triton.next_power_of_2(count), RANK=rank, num_warps=1,
    )  # fmt: skip
    return out


def accept(draft: Draft, chosen: Tensor) -> Path:
    """As the reference, of a tree."""
    tree, (requests, rows) = draft.tree, chosen.shape
    assert tree is not None
    path, reads, taken = (chosen.new_empty(requests, tree.depth + 1) for _ in range(3))
    drafts = chosen.new_empty(requests, tree.depth)
    _walk[(requests,)](
        draft.tokens, tree, chosen, path, reads, drafts, taken, rows,
        ROWS=triton.next_power_of_2(rows), num_warps=1,
    )  # fmt: skip
    return Path(drafts, taken, path, reads)


def compact(
    cache: Tensor, slots: Tensor, requests: Tensor, starts: Tensor, limits: Tensor, path: Tensor
) -> None:
    """As the reference."""
    layers, numbers = cache.shape[0], cache.shape[3] * cache.shape[4]
    _compact[(len(requests), 2 * layers, triton.cdiv(numbers, HELD.value))](
        cache, slots, requests, starts, limits, path, path.shape[1], cache.stride()[:2],
        slots.stride(0), numbers, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["nodes"])
def _unbranched(rates, computed, limits, requests, unbranched, nodes):
    index = tl.program_id(0)
    request = tl.load(requests + index)
    repetition, presence, frequency = rates_of(rates, request)
    penalized = are_some(repetition, presence, frequency)
    limit = tl.load(limits + request)
    short = (tl.load(computed + request) + nodes + 1 > limit) & (limit > 0)
    tl.store(unbranched + index, (penalized | short).to(tl.int64))


@triton.jit
def _log_share(found, pairs, race, out, slots, count, COUNT: tl.constexpr, RANK: tl.constexpr):
    """How probable each candidate of a slot is after one of the slot before it, in logarithms."""
    index, slot, before = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if (slot == 0) & (before > 0):
        return
    request, lane = tl.load(race.requests + index), tl.arange(0, COUNT)
    inside, at = lane < count, index * slots + slot
    how = race.sampling
    temperature = tl.load(how.temperature + request)
    score = tl.load(found.scores + at * count + lane, mask=inside, other=float("-inf"))
    if pairs is not None:
        previous = tl.load(found.tokens + tl.maximum(at - 1, 0) * count + before)
        draft = tl.load(found.ids + at * count + lane, mask=inside, other=0)
        score += added_scores(pairs, at, slot, previous, draft, RANK)
    top_k, min_p = tl.load(how.top_k + request), tl.load(how.min_p + request)
    score = kept_scores(score, temperature, top_k, min_p)
    token = tl.load(found.tokens + at * count + lane, mask=inside, other=0)
    key = row_key(tl.load(how.seeds + request), tl.load(race.newest + request) + 1 + slot)
    value = raced(score, tl.log(arrival_time(key, token)), temperature)
    value = tl.where(inside & (value == value), value, float("-inf"))
    top = tl.max(value, 0)
    share = tl.sum(tl.exp(value - tl.where(top == float("-inf"), 0.0, top)), 0)
    value = tl.where(top == float("-inf"), value, value - top - tl.log(share))
    row = at * tl.num_programs(2) + before
    tl.store(out + row * count + lane, value, mask=inside)


@triton.jit(do_not_specialize=["nodes"])
def _grow(
    shares,
    tokens,
    unbranched,
    out,
    tree,
    befores,
    count,
    nodes,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find nodes one after another: each is the likeliest candidate that is open after any row."""
    index, slots = tl.program_id(0).to(tl.int64), tree.depth
    branches = tl.load(unbranched + index) == 0
    lane, row = tl.arange(0, COUNT), tl.arange(0, ROWS)
    inside, place = lane < count, row[:, None] * COUNT + lane[None, :]
    first = tl.load(
        shares + index * slots * befores * count + lane, mask=inside, other=float("-inf")
    )
    # `costs`, in logarithms: the path to a row, and after it a candidate of the slot behind
    #
    #            a     b     c
    #   row 0  -0.2  -1.8  -2.9     the highest number is the next node: a, which becomes row 1
    #   row 1  -inf  -inf  -inf     its own candidates are entered then, and a of row 0 is -inf
    #   ...
    costs = tl.where(row[:, None] == 0, first[None, :], float("-inf"))
    depth_of = tl.zeros([ROWS], tl.int32)
    word_of = tl.where(row == 0, 1, 0)
    tl.store(tree.depths + index * (nodes + 1), tl.zeros([], tl.int64))
    tl.store(tree.ancestors + index * (nodes + 1), 1)
    for node in range(1, nodes + 1):
        best = tl.max(tl.max(costs, 1), 0)
        there = best > float("-inf")
        at = tl.min(tl.min(tl.where(costs == best, place, ROWS * COUNT), 1), 0)
        parent, candidate = tl.where(there, at // COUNT, 0), tl.where(there, at % COUNT, 0)
        above = tl.sum(tl.where(row == parent, depth_of, 0), 0)
        token = tl.load(tokens + (index * slots + tl.where(there, above, 0)) * count + candidate)
        depth = tl.where(there, above + 1, 1)
        word = tl.sum(tl.where(row == parent, word_of, 0), 0) | (1 << node)
        # where a request must not branch, its parent has no other child
        taken = (row[:, None] == parent) & ((lane[None, :] == candidate) | (branches == 0))
        costs = tl.where(taken, float("-inf"), costs)
        goes_on = there & (depth < slots)
        after = (index * slots + tl.where(goes_on, depth, 0)) * befores
        after += tl.minimum(tl.where(goes_on, candidate, 0), befores - 1)
        following = tl.load(shares + after * count + lane, mask=inside, other=float("-inf"))
        following = tl.where(goes_on, best + following, float("-inf"))
        costs = tl.where(row[:, None] == node, following[None, :], costs)
        depth_of = tl.where(row == node, depth, depth_of)
        word_of = tl.where(row == node, word, word_of)
        tl.store(out + index * nodes + node - 1, tl.where(there, token, NONE))
        tl.store(tree.parents + index * nodes + node - 1, parent.to(tl.int64))
        tl.store(tree.depths + index * (nodes + 1) + node, depth.to(tl.int64))
        tl.store(tree.ancestors + index * (nodes + 1) + node, word)


@triton.jit(do_not_specialize=["rows"])
def _walk(tokens, tree, chosen, path, reads, drafts, taken, rows, ROWS: tl.constexpr):
    index, slots = tl.program_id(0).to(tl.int64), tree.depth
    node = tl.arange(0, ROWS)
    inside = node < rows - 1
    at = index * (rows - 1) + node
    token = tl.load(tokens + at, mask=inside, other=NONE)
    parent = tl.load(tree.parents + at, mask=inside, other=-1)
    row = tl.zeros([], tl.int64)
    goes_on = row == 0
    for depth in range(slots + 1):
        wanted = tl.load(chosen + index * rows + row)
        # behind the last accepted row each is in its place already, so that `_compact` moves none
        here = tl.where(goes_on, row, depth)
        tl.store(path + index * (slots + 1) + depth, here)
        tl.store(reads + index * (slots + 1) + depth, index * rows + here)
        tl.store(taken + index * (slots + 1) + depth, tl.where(goes_on, wanted, -1))
        found = inside & (parent == row) & (token == wanted)
        following = tl.min(tl.where(found, node, ROWS), 0) + 1
        goes_on = goes_on & (following <= ROWS)
        row = tl.where(goes_on, following.to(tl.int64), row)
        if depth < slots:
            tl.store(drafts + index * slots + depth, tl.where(goes_on, wanted, NONE))


@triton.jit(do_not_specialize=["length"])
def _compact(cache, slots, requests, starts, limits, path, length, strides, slots_stride, numbers):
    """One layer's keys or values of a request, from the root on: no row moves onto one that still
    has to move."""
    index, side = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    request = tl.load(requests + index)
    layer_stride, side_stride = strides
    own = cache + side // 2 * layer_stride + side % 2 * side_stride
    number = tl.program_id(2) * HELD + tl.arange(0, HELD)
    start, limit = tl.load(starts + index), tl.load(limits + request)
    for depth in range(1, length):
        row = tl.load(path + index * length + depth)
        if (row != depth) & (start + row < limit):
            at = slots + request * slots_stride + start
            source, target = tl.load(at + row), tl.load(at + depth)
            moved = tl.load(own + source * numbers + number, mask=number < numbers)
            tl.store(own + target * numbers + number, moved, mask=number < numbers)
