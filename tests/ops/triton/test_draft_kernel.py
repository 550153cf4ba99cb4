"""Candidates, and drafts drawn among them: the kernels and their twins."""

import pytest
import torch
from torch import Tensor

from peagle.ops import candidates, draft
from peagle.ops.candidates import Candidates, Pairs
from peagle.ops.race import Race
from peagle.ops.sampling import Sampling

VOCAB, DRAFT_VOCAB, SLOTS, RANK = 400, 301, 4, 20
SETTINGS = (
    (1.0, 0, 0.0),
    (0.7, 3, 0.0),
    (0.0, 0, 0.0),
    (1.3, 0, 0.3),
    (0.9, 500, 0.01),
    (0.0, 4, 0.5),
    (1e-3, 1, 1.0),
)
"""Temperature, top-k and min-p of the table's rows."""


def race() -> Race:
    """Of every row of the table, in another order, and one of them twice."""
    temperature, top_k, min_p = torch.tensor(SETTINGS).T.contiguous()
    rows = len(SETTINGS)
    seeds = torch.arange(rows) * 7919 - 3
    how = Sampling(temperature, top_k.long(), torch.full((rows,), 0.1), min_p, seeds)
    requests = torch.tensor([*range(rows), 3]).flip(0)
    return Race(how, torch.arange(rows) * 31, requests)


def moved(value, device: torch.device):  # type: ignore[no-untyped-def]
    if torch.is_tensor(value):
        return value.to(device)
    return type(value)(*(moved(column, device) for column in value))


def offsets() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    kept = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    return kept - torch.arange(DRAFT_VOCAB)


def ranked(logits: Tensor, count: int) -> Tensor:
    """The highest, the first ones among equals, in the vocabulary's order."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort().values


@pytest.fixture(params=[128, 512])
def block(request, monkeypatch: pytest.MonkeyPatch) -> int:
    from peagle.ops.triton import candidates as kernel

    monkeypatch.setattr(kernel, "BLOCK", request.param)
    return request.param


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [16, 32])
def test_the_likeliest(device: torch.device, block: int, dtype: torch.dtype, count: int) -> None:
    from peagle.ops.triton import candidates as kernel

    torch.manual_seed(block)
    logits = (3 * torch.randn(6, DRAFT_VOCAB)).to(dtype)
    logits[1] = torch.randint(-1, 2, (DRAFT_VOCAB,)).to(dtype) * -0.0
    logits[2, 5:] = float("-inf")
    logits[3] = torch.randint(-3, 4, (DRAFT_VOCAB,)).to(dtype)
    found = kernel.likeliest(logits.to(device), offsets().to(device), count)
    scores, ids, tokens = (column.cpu() for column in found)
    assert torch.equal(ids, ranked(logits, count))
    assert torch.equal(scores, logits.gather(1, ids).float())
    assert torch.equal(tokens, ids + offsets()[ids])
    theirs = candidates.likeliest(logits[[0, 4, 5]].float(), offsets(), count)
    assert torch.equal(theirs.ids, ids[[0, 4, 5]]) or dtype != torch.float32


def test_greedy_requests_get_the_first_of_the_likeliest(device: torch.device, block: int) -> None:
    from peagle.ops.triton import candidates as kernel

    known = race()._replace(requests=torch.tensor([2, 0, 5]))
    logits = torch.randint(-2, 3, (len(known.requests) * SLOTS, DRAFT_VOCAB)).float()
    greedy = (known.sampling.temperature[known.requests] == 0).repeat_interleave(SLOTS)
    broken = int(greedy.nonzero()[0])
    logits[broken, [7, 200]] = float("nan")
    logits[broken + 1] = float("-inf")
    given = logits.to(device), offsets().to(device), 32, moved(known, device)
    scores, ids, tokens = kernel.earliest(*given, 0, False)
    best = logits.nan_to_num(float("-inf")).argmax(dim=1)
    best[broken] = 0
    assert ids[greedy, 0].tolist() == best[greedy].tolist()
    assert tokens[greedy, 0].tolist() == (best + offsets()[best])[greedy].tolist()
    drawn = drawn_by_kernel(scores, ids, tokens, known, device)
    assert drawn.flatten()[greedy].tolist() == tokens[greedy, 0].tolist()


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "raced", "depth"), [(5, 40, 3), (16, 64, 0), (32, 100, 1), (40, 30, 0)]
)
def test_the_earliest(
    device: torch.device,
    block: int,
    dtype: torch.dtype,
    count: int,
    raced: int,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of greedy requests the likeliest."""
    from peagle.ops.triton import candidates as kernel

    for module in (candidates, kernel):
        monkeypatch.setattr(module, "RACED", raced)
    torch.manual_seed(block + count)
    known = race()
    logits = (2 * torch.randn(len(known.requests) * SLOTS, DRAFT_VOCAB)).to(dtype)
    given = logits.to(device), offsets().to(device), count, moved(known, device), depth
    scores, ids, tokens = (column.cpu() for column in kernel.earliest(*given, True))
    assert torch.equal(scores, logits.gather(1, ids).float())
    assert torch.equal(tokens, ids + offsets()[ids])
    greedy = (known.sampling.temperature[known.requests] == 0).repeat_interleave(SLOTS)
    assert torch.equal(ids[greedy], ranked(logits, count)[greedy])
    assert torch.equal(ids, ranked(logits, count)) == (raced < count)
    theirs = candidates.earliest(logits.float(), offsets(), count, known, depth)
    same = (theirs.ids == ids).all(dim=1)
    # of equal scores, which bfloat16 has many of, any may be the last of those raced
    assert same.all() or dtype == torch.bfloat16
    assert same.float().mean() > 0.8


def test_who_is_drawn_is_often_none_of_the_likeliest() -> None:
    torch.manual_seed(5)
    known = race()._replace(requests=torch.tensor([0, 3]))
    logits = torch.randn(2 * 7, DRAFT_VOCAB) / 2
    found = candidates.earliest(logits, offsets(), 16, known).by_request(7)
    drawn = draft.draw(found, None, known)
    likeliest = candidates.likeliest(logits, offsets(), 16).by_request(7).tokens
    assert (drawn[..., None] == likeliest).any(dim=-1).float().mean() < 0.7


def test_of_all_that_a_request_takes_part_in_the_first_arrives_first() -> None:
    """Whatever of them is drafted, top-k and min-p leave nothing else where there is enough."""
    torch.manual_seed(3)
    known = race()
    logits = 3 * torch.randn(len(known.requests) * SLOTS, DRAFT_VOCAB)
    found = candidates.earliest(logits, offsets(), 8, known).by_request(SLOTS)
    drawn = draft.draw(found, None, known)
    all_of_them = candidates.likeliest(logits, offsets(), DRAFT_VOCAB).by_request(SLOTS)
    wanted = draft.draw(all_of_them, None, known)
    assert (drawn == wanted).float().mean() > 0.9
    few = candidates.likeliest(logits, offsets(), 8).by_request(SLOTS)
    assert not torch.equal(draft.draw(few, None, known), wanted)


def drawn_by_kernel(
    scores: Tensor, ids: Tensor, tokens: Tensor, known: Race, device: torch.device
) -> Tensor:
    from peagle.ops.triton import draft as kernel

    found = Candidates(scores, ids, tokens).by_request(SLOTS)
    return kernel.draw(found, None, moved(known, device), 0).cpu()


def test_whatever_scores_are_drafts_are_tokens(device: torch.device) -> None:
    known, count = race(), 32
    shape = (len(known.requests) * SLOTS, count)
    ids = torch.arange(count).expand(shape).contiguous().to(device)
    for value in (float("nan"), float("-inf"), float("inf")):
        scores = torch.full(shape, value, device=device)
        drawn = drawn_by_kernel(scores, ids, ids + 3, known, device)
        assert drawn.min() >= 3
        assert drawn.max() < count + 3


@pytest.mark.sweep
@pytest.mark.parametrize("count", [5, 16, 32])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("depth", [0, 3])
def test_drafts_are_drawn_as_the_twin_draws_them(
    device: torch.device, count: int, paired: bool, depth: int
) -> None:
    from peagle.ops.triton import draft as kernel

    torch.manual_seed(count)
    known = race()
    requests = len(known.requests)
    logits = 2 * torch.randn(requests * SLOTS, DRAFT_VOCAB)
    found = candidates.likeliest(logits, offsets(), count).by_request(SLOTS)
    pairs = None
    if paired:
        sides = torch.randn(VOCAB, RANK), torch.randn(DRAFT_VOCAB, RANK) / RANK**0.5
        pairs = Pairs(*sides, torch.randn(requests, SLOTS, RANK))
    expected = draft.draw(found, pairs, known, depth)
    inputs = (moved(value, device) if value is not None else None for value in (found, pairs))
    tokens = kernel.draw(*inputs, moved(known, device), depth)
    assert torch.equal(tokens.cpu(), expected)
    assert len(set(tokens.flatten().tolist())) > SLOTS
