"""Trees: the kernels and their twins."""

from dataclasses import replace

import pytest
import torch
from paged_rows import KV_HEADS, LENGTH, SIZE, close, on, pass_rows, spec_of
from test_draft_kernel import RANK, SETTINGS, SLOTS, VOCAB, moved, race

from peagle.ops import cached_attention
from peagle.ops import tree as reference
from peagle.ops.acceptance import accept
from peagle.ops.candidates import Candidates, Pairs
from peagle.ops.cycle_state import CycleState
from peagle.ops.draft import NO_DRAFT, Draft, Tree

REQUESTS = len(SETTINGS) + 1


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(2)


def found(count: int) -> Candidates:
    scores = torch.randn(REQUESTS, SLOTS, count) * 3
    ids = torch.stack([torch.randperm(VOCAB)[:count] for _ in range(REQUESTS * SLOTS)])
    ids = ids.view(REQUESTS, SLOTS, count)
    return Candidates(scores, ids, ids.flip(0))


def pairs_of(wanted: bool) -> Pairs | None:
    if not wanted:
        return None
    sizes = (VOCAB, RANK), (VOCAB, RANK), (REQUESTS, SLOTS, RANK)
    return Pairs(*(torch.randn(size) * 0.4 for size in sizes))


def alone() -> torch.Tensor:
    return torch.tensor([index == 3 for index in range(REQUESTS)]).long()


def test_drafts_branch_where_slots_and_penalties_allow(device: torch.device):
    """Row 0 does; 1 to 3 have a penalty each, 4 lacks a slot, 5 has just enough, 6 is nobody's."""
    from peagle.ops.triton import tree as kernels

    state = CycleState.empty(torch.zeros(7, 1), torch.zeros(7).long(), torch.zeros(7, 1, 1), 9, 3)
    state.computed.copy_(torch.tensor([5, 5, 5, 5, 5, 5, 30]))
    state.limits.copy_(torch.tensor([40, 40, 40, 40, 14, 15, 0]))
    for row in range(1, 4):
        state.penalties.rates[row, row - 1] = 0.5
    requests = torch.tensor([6, 5, 4, 3, 2, 1, 0, 0])
    wanted = reference.find_unbranched(state, requests, 9)
    assert wanted.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    found_ones = kernels.find_unbranched(moved(state, device), requests.to(device), 9)
    assert torch.equal(found_ones.cpu(), wanted)


@pytest.mark.sweep
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("count", "nodes"), [(5, 9), (12, 15), (3, 30)])
def test_growing(device: torch.device, pairs: bool, count: int, nodes: int):
    from peagle.ops.triton import tree as kernels

    given = found(count), pairs_of(pairs), race(), nodes, alone()
    wanted = reference.grow(*given)
    moved_ones = [None if one is None else moved(one, device) for one in given[:3]]
    grown = kernels.grow(*moved_ones, nodes, given[4].to(device))
    assert torch.equal(grown.tokens.cpu(), wanted.tokens)
    assert grown.depth == wanted.depth == SLOTS
    for name in ("parents", "depths", "ancestors"):
        assert torch.equal(getattr(grown.tree, name).cpu(), getattr(wanted.tree, name)), name


def test_a_tree_is_made_of_the_likeliest_paths():
    """Counted by hand: two slots of three candidates, greedy."""
    shares = torch.tensor([[[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]]).log()
    ids = torch.tensor([[[7, 8, 9], [4, 5, 6]]])
    of_one = race()
    of_one = of_one._replace(requests=torch.tensor([2]))
    grown = reference.grow(Candidates(shares, ids, ids), None, of_one, 6, torch.zeros(1))
    # 0.5, then 0.30, 0.30 (after the first), 0.2, 0.18, 0.15: of equals whichever
    assert grown.tokens[0, 0] == 7
    assert sorted(grown.tokens[0].tolist()) == [4, 4, 5, 7, 8, 9]
    assert grown.tree.depths[0].bincount().tolist() == [1, 3, 3]
    for row in range(1, 7):
        parent = int(grown.tree.parents[0, row - 1])
        assert grown.tree.depths[0, row] == grown.tree.depths[0, parent] + 1
        assert grown.tree.ancestors[0, row] == grown.tree.ancestors[0, parent] | 1 << row
    chain = reference.grow(Candidates(shares, ids, ids), None, of_one, 6, torch.ones(1))
    assert chain.tokens[0].tolist() == [7, 4, *[NO_DRAFT] * 4]
    assert chain.tree.parents[0].tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("nodes", [6, 15])
def test_walking(device: torch.device, nodes: int):
    """Along trees of few tokens, so that the target often agrees; also where it says NaN."""
    from peagle.ops.triton import tree as kernels

    few = found(4)._replace(tokens=torch.randint(0, 5, (REQUESTS, SLOTS, 4)))
    grown = reference.grow(few, None, race(), nodes, alone())
    chosen = torch.randint(-1, 5, (REQUESTS, nodes + 1))
    chosen[::2, 0] = grown.tokens[::2, 0]
    chosen[::4, 1] = grown.tokens[::4, 2]
    wanted = accept(grown, chosen)
    tree = Tree(*(x.to(device) if torch.is_tensor(x) else x for x in grown.tree))
    walked = kernels.accept(Draft(grown.tokens.to(device), tree), chosen.to(device))
    for column, expected in zip(vars(walked).values(), vars(wanted).values(), strict=True):
        assert torch.equal(column.cpu(), expected)
    assert wanted.reads[-1, 0] == (REQUESTS - 1) * (nodes + 1)
    assert (wanted.drafts >= 0).sum() > 1
    assert (wanted.drafts == wanted.chosen[:, :-1]).logical_or(wanted.drafts == NO_DRAFT).all()


def test_paths_move_together(device: torch.device):
    """Not where slots end."""
    from peagle.ops.triton import tree as kernels

    cache = torch.randn(3, 2, 80, KV_HEADS, SIZE)
    slots = torch.randperm(80)[:60].view(3, 20)
    path = torch.tensor([[0, 1, 2, 3], [0, 2, 5, 9], [0, 4, 5, 6]])
    given = slots, torch.tensor([2, 0, 1]), torch.tensor([5, 8, 3]), torch.tensor([20, 9, 12]), path
    moved_cache, expected = cache.clone().to(device), cache.clone()
    kernels.compact(moved_cache, *(each.to(device) for each in given))
    reference.compact(expected, *given)
    assert torch.equal(moved_cache.cpu(), expected)
    changed = (expected != cache).any(dim=(0, 1, 3, 4)).nonzero()[:, 0].tolist()
    # row 6 of the last request would be at 9 of 9
    assert sorted(changed) == sorted([*slots[0, [9, 10, 11]].tolist(), *slots[1, [4, 5]].tolist()])


@pytest.mark.sweep
@pytest.mark.parametrize("window", [None, 9, 70])
@pytest.mark.parametrize("starts", [[3, 0, 130], [700, 64, 61]])
def test_rows_see_their_ancestors_alone(
    device: torch.device, starts: list[int], window: int | None
):
    """Through windows as well, which go by depths."""
    from peagle.ops.triton import cached_attention as kernel

    counts = [8, 8, 8]
    spec, rows = replace(spec_of(), window=window), pass_rows(starts, counts, 8)
    parents = torch.tensor([[0, 0, 1, 2, 2, 1, 0], [0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0, 0]])
    words = torch.ones(3, 8, dtype=torch.int32)
    for row in range(1, 8):
        above = words.gather(1, parents[:, row - 1 : row])
        words[:, row] = above[:, 0] | 1 << row
    depths = torch.tensor([[word.bit_count() - 1 for word in of] for of in words.tolist()])
    positions = (torch.tensor(starts)[:, None] + depths).flatten()
    rows = replace(rows, positions=positions, ancestors=words.flatten())
    query, cache = torch.randn(24, 4, SIZE), torch.randn(2, 3 * LENGTH, KV_HEADS, SIZE)
    expected = cached_attention.attend(query, spec, cache, rows)
    found_ones = kernel.attend(
        query.to(device), on(device, spec), cache.to(device), on(device, rows)
    )
    close(found_ones[:-1], expected[:-1])  # the last row has no slot
    plain = cached_attention.attend(query, spec, cache, replace(rows, ancestors=None))
    assert torch.equal(expected[8:16], plain[8:16])  # a chain
    assert not torch.allclose(expected[:8], plain[:8])


def test_a_tree_behind_the_end_of_the_context_sees_nothing(device: torch.device):
    """As the next cycle's of a request that has just ended, which the host does not know yet."""
    from peagle.ops.triton import cached_attention as kernel

    spec, rows = spec_of(), pass_rows([5, 20], [4, 4], 4)
    words = torch.tensor([1, 3, 5, 9]).repeat(2).int()
    rows = replace(rows, ancestors=words, limits=torch.tensor([LENGTH, 18]))
    query, cache = torch.randn(8, 4, SIZE), torch.randn(2, 2 * LENGTH, KV_HEADS, SIZE)
    expected = cached_attention.attend(query, spec, cache, rows)
    moved_ones = query.to(device), on(device, spec), cache.to(device), on(device, rows)
    close(kernel.attend(*moved_ones)[:4], expected[:4])
    assert not expected[4:].any()
