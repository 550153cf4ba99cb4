"""Drafts that branch: which ones, and where the keys of those go that the target confirms.

A tree has the newest token as its root and drafts as nodes. All of them are rows of one pass: row 0
is the root, and a node comes after its parent. A node's position is the root's plus its depth, but
its keys are written by its row, since nodes of one depth would overwrite one another:

    row        0     1     2     3     4           accepted: 0, 1, 3
    token      x ─── a ─── b                       keys of row 3 move to the place of row 2
                └─────── c (after a) ...
    slot       n    n+1   n+2   n+3   n+4

The target's choice after a row is exact whatever the tree is, so that any tree gives the same text.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.config import NO_PENALTIES
from peagle.ops.candidates import Candidates, Pairs, paired_scores
from peagle.ops.cycle_state import CycleState
from peagle.ops.draft import NO_DRAFT, Draft, Tree
from peagle.ops.race import Race, draft_scores
from peagle.ops.triton import in_kernels


@in_kernels("tree")
def find_unbranched(state: CycleState, requests: Tensor, nodes: int) -> Tensor:
    """[requests] int64, whether a request's drafts must not branch.

    Penalties count the drafts before a row as if there were no others, and a node behind a
    request's last slot might not see its parent. Rows that belong to no request branch, since they
    are timed in the place of others.
    """
    rates = state.penalties.rates
    penalized = (rates[requests] != torch.tensor(NO_PENALTIES, device=rates.device)).any(dim=1)
    needed, limits = state.computed[requests] + nodes + 1, state.limits[requests]
    return (penalized | ((needed > limits) & (limits > 0))).long()


@in_kernels("tree", lambda _, found, pairs, race, *rest: race is not None)
def grow(
    found: Candidates, pairs: Pairs | None, race: Race | None, nodes: int, unbranched: Tensor
) -> Draft:
    """The likeliest nodes: of all paths among the candidates the most probable ones.

    found: [requests, slots, candidates]; pairs, race: as in `draft.draw`, for drafts from depth 0
    on; nodes: drafts of each request; unbranched: [requests] whether a request's drafts must not
    branch.
    """
    shares = _log_shares(found, pairs, race).numpy(force=True)
    candidates, chains = found.tokens.numpy(force=True), unbranched.tolist()
    rows = [_grown(*one, nodes) for one in zip(shares, candidates, chains, strict=True)]
    each = torch.from_numpy(np.stack(rows, axis=1)).to(unbranched.device)
    tokens, parents = each[:2, :, 1:].contiguous()
    return Draft(tokens, Tree(parents, each[2], each[3].to(torch.int32), found.tokens.shape[1]))


def _log_shares(found: Candidates, pairs: Pairs | None, race: Race | None) -> Tensor:
    """How probable each draft is after each of the slot before it: [requests, slots, candidates
    before, candidates], in logarithms; alike for all of these without pairs, and in slot 0."""
    count = found.scores.shape[-1]
    scores = paired_scores(found, pairs).expand(-1, -1, count, -1)
    if race is None:
        return scores.log_softmax(dim=-1)
    values = draft_scores(scores, found.tokens, race)
    return values.log_softmax(dim=-1).nan_to_num(nan=-math.inf, neginf=-math.inf)


def _grown(
    shares: NDArray[np.float32], candidates: NDArray[np.int64], unbranched: bool, nodes: int
) -> NDArray[np.int64]:
    """[4, nodes + 1] tokens, parents, depths and ancestors of one request's rows, the root's first.

    shares: [slots, candidates before, candidates]; candidates: [slots, candidates] target ids.
    """
    slots, _, count = shares.shape
    costs = np.full((nodes + 1, count), -math.inf, dtype=np.float32)
    costs[0] = shares[0, 0]
    rows = [(NO_DRAFT, 0, 0, 1)]
    for row in range(1, nodes + 1):
        parent, place = divmod(int(costs.argmax()), count)
        best = costs[parent, place]
        if not best > -math.inf:  # nor a NaN
            rows.append((NO_DRAFT, 0, 1, 1 | 1 << row))
            continue
        _, _, above, ancestors = rows[parent]
        rows.append((candidates[above, place], parent, above + 1, ancestors | 1 << row))
        costs[parent, slice(None) if unbranched else place] = -math.inf
        if above + 1 < slots:
            np.add(shares[above + 1, place], best, out=costs[row])
    return np.array(rows).T


@in_kernels("tree")
def compact(
    cache: Tensor, slots: Tensor, requests: Tensor, starts: Tensor, limits: Tensor, path: Tensor
) -> None:
    """Move the keys and values of accepted rows to where they would be without branches.

    cache: [layers, 2, slots, kv_heads, head_dim]; slots, limits: as in `PassRows`; requests:
    [requests] table rows; starts: [requests] positions of the roots; path: [requests, depth + 1].
    """
    columns = requests, starts, limits[requests], path
    for request, start, end, rows in zip(*(each.tolist() for each in columns), strict=True):
        moved = [
            (row, depth) for depth, row in enumerate(rows) if row != depth and start + row < end
        ]
        if moved:
            sources, targets = slots[request, start + torch.tensor(moved, device=slots.device).T]
            cache[:, :, targets] = cache[:, :, sources]
