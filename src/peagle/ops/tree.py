"""Drafts that branch: which ones, which of them the target confirms, and where their keys go.

A tree has the newest token as its root and drafts as nodes. All of them are rows of one pass: row 0
is the root, and a node comes after its parent. A node's position is the root's plus its depth, but
its keys are written by its row, since nodes of one depth would overwrite one another:

    row        0     1     2     3     4           accepted: 0, 1, 3
    token      x ─── a ─── b                       keys of row 3 move to the place of row 2
                └─────── c (after a) ...
    slot       n    n+1   n+2   n+3   n+4

The target's choice after a row is exact whatever the tree is, so that any tree gives the same text.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.ops.candidates import Candidates, Pairs
from peagle.ops.race import Race, draft_scores
from peagle.ops.triton import has_kernels, kernels

NOBODY = -2
"""The token of a node that is none; no target chooses it."""


@dataclass(frozen=True)
class Tree:
    """The drafts of some requests, as many for each."""

    tokens: Tensor
    """[requests, nodes] target ids; `NOBODY` where there is no such node"""
    parents: Tensor
    """[requests, nodes] row of the parent"""
    depths: Tensor
    """[requests, nodes + 1] of each row; 0 for the root, 1 for a node that is none"""
    ancestors: Tensor
    """[requests, nodes + 1] int32, bit j: row j is on the way from the root, or the row itself"""


@dataclass(frozen=True)
class Path:
    """What the target confirms of a tree, written as drafts without branches are."""

    rows: Tensor
    """[requests, depth + 1] the tree's rows from the root on; behind the last accepted one any"""
    drafts: Tensor
    """[requests, depth] the accepted drafts, then `NOBODY`"""
    chosen: Tensor
    """[requests, depth + 1] what the target takes after each of them, first after the root"""


def grow(found: Candidates, pairs: Pairs | None, race: Race, nodes: int, alone: Tensor) -> Tree:
    """The likeliest nodes: of all paths among the candidates the most probable ones.

    found: [requests, slots, candidates]; pairs, race: as in `draw_drafts`, for drafts from depth 0
    on; alone: [requests] whether a request's drafts must not branch.
    """
    if has_kernels(found.scores):
        return Tree(*kernels("tree").grow(found, pairs, race, nodes, alone))
    requests, device = len(found.ids), found.ids.device
    tokens, parents = (torch.zeros(requests, nodes, dtype=torch.int64) for _ in range(2))
    depths = torch.zeros(requests, nodes + 1, dtype=torch.int64)
    ancestors = torch.ones(requests, nodes + 1, dtype=torch.int64)
    shares = _log_shares(found, pairs, race)
    for request in range(requests):
        chosen = list(_best_first(shares[request].tolist(), nodes, bool(alone[request])))
        for node in range(nodes):
            row = node + 1
            parent, depth, place = chosen[node] if node < len(chosen) else (0, 1, None)
            parents[request, node], depths[request, row] = parent, depth
            tokens[request, node] = (
                NOBODY if place is None else found.tokens[request, depth - 1, place]
            )
            ancestors[request, row] = ancestors[request, parent] | 1 << row
    words = ancestors.to(torch.int32)
    return Tree(*(part.to(device) for part in (tokens, parents, depths, words)))


def _log_shares(found: Candidates, pairs: Pairs | None, race: Race) -> Tensor:
    """How probable each draft is after each of the slot before it: [requests, slots, candidates
    before, candidates], in logarithms; alike for all of these without pairs, and in slot 0."""
    scores, count = found.scores[:, :, None], found.scores.shape[-1]
    scores = scores.expand(-1, -1, count, -1)
    if pairs is not None:
        later = Pairs(pairs.predecessor, pairs.successor, pairs.gates[:, 1:])
        added = later.scores(found.tokens[:, :-1], found.ids[:, 1:]).float()
        scores = scores + torch.cat((torch.zeros_like(scores[:, :1]), added), dim=1)
    values = draft_scores(scores, found.tokens, race)
    return values.log_softmax(dim=-1).nan_to_num(nan=-math.inf, neginf=-math.inf)


def _best_first(
    shares: list[list[list[float]]], nodes: int, alone: bool
) -> Iterator[tuple[int, int, int]]:
    """(parent's row, depth, place among the candidates) of the most probable nodes."""
    count = len(shares[0][0])
    open_nodes = [(-shares[0][0][place], 0, place, 0, 0) for place in range(count)]
    heapq.heapify(open_nodes)
    row = 0
    while open_nodes and row < nodes:
        cost, parent, place, depth, _ = heapq.heappop(open_nodes)
        if cost == math.inf:
            return
        row += 1
        yield parent, depth + 1, place
        if alone:
            open_nodes.clear()
        if depth + 1 < len(shares):
            for following in range(count):
                after = cost - shares[depth + 1][place][following]
                heapq.heappush(open_nodes, (after, row, following, depth + 1, 0))


def walk(tree: Tree, chosen: Tensor, slots: int) -> Path:
    """Follow the target's choices from the root on.

    chosen: [requests, nodes + 1] what the target takes after each row, -1 for NaN logits; slots:
    the greatest depth.
    """
    if has_kernels(chosen):
        return Path(*kernels("tree").walk(tree, chosen, slots))
    requests, device = len(chosen), chosen.device
    rows = torch.arange(slots + 1, device=device).repeat(requests, 1)
    drafts = torch.full((requests, slots), NOBODY, dtype=torch.int64, device=device)
    taken = torch.full((requests, slots + 1), -1, dtype=torch.int64, device=device)
    for request in range(requests):
        row = 0
        for depth in range(slots + 1):
            rows[request, depth] = row
            token = taken[request, depth] = chosen[request, row]
            found = (tree.parents[request] == row) & (tree.tokens[request] == token)
            if depth == slots or not bool(found.any()):
                break
            row = int(found.nonzero()[0]) + 1
            drafts[request, depth] = token
    return Path(rows, drafts, taken)


def compact(
    cache: Tensor, slots: Tensor, requests: Tensor, starts: Tensor, limits: Tensor, path: Tensor
) -> None:
    """Move the keys and values of accepted rows to where they would be without branches.

    cache: [layers, 2, slots, kv_heads, head_dim]; slots, limits: as in `PassRows`; requests:
    [requests] table rows; starts: [requests] positions of the roots; path: [requests, depth + 1].
    """
    if has_kernels(cache):
        kernels("tree").compact(cache, slots, requests, starts, limits, path)
        return
    for request, start, rows in zip(requests.tolist(), starts.tolist(), path.tolist(), strict=True):
        for depth, row in enumerate(rows):
            if row != depth and start + row < int(limits[request]):
                source, target = slots[request, start + row], slots[request, start + depth]
                cache[:, :, target] = cache[:, :, source]
