import pytest
import torch
from torch import Tensor

from peagle.ops import cycle_state as reference
from peagle.ops.acceptance import Path
from peagle.ops.cycle_state import CycleState, FirstNorms
from peagle.ops.norm import RMSNorm
from peagle.ops.penalties import Penalties

K, HIDDEN, VOCAB, ROWS = 3, 24, 50, 4
PENDING = K + 3
"""Positions that may wait for the drafter."""


@pytest.fixture
def state(device: torch.device) -> CycleState:
    torch.manual_seed(5)
    return moved(
        CycleState(
            slots=torch.arange(ROWS * 64).view(ROWS, 64),
            limits=torch.tensor([64, 64, 0, 64]),
            computed=torch.tensor([7, 11, 20, 1]),
            pending=torch.tensor([1, 4, 2, 1]),
            emitted=torch.randint(0, VOCAB, (ROWS, PENDING)),
            features=torch.randn(ROWS, PENDING, HIDDEN),
            ks=torch.tensor([3, 3, 1, 3]),
            results=torch.full((ROWS, K + 2), -7),
            penalties=Penalties.none(ROWS, VOCAB, device),
        ),
        device,
    )


def moved(value, device):  # type: ignore[no-untyped-def]
    return type(value)(*(v.to(device) if torch.is_tensor(v) else v for v in value))


def twin(state: CycleState) -> CycleState:
    """A copy on the CPU, which the reference works on."""
    copies = {name: column.cpu().clone() for name, column in columns(state).items()}
    return CycleState(**copies, penalties=Penalties.none(ROWS, VOCAB, torch.device("cpu")))


def columns(state: CycleState) -> dict[str, Tensor]:
    """All but its penalties."""
    return {name: column for name, column in state._asdict().items() if torch.is_tensor(column)}


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masks", [0, K - 1])
@pytest.mark.parametrize(("before", "pending"), [(False, K + 1), (True, K + 1), (True, 2)])
def test_draft_inputs(
    state: CycleState, device: torch.device, masks: int, before: bool, pending: int
) -> None:
    from peagle.ops.triton import cycle_state as kernel

    norms = FirstNorms(
        torch.randn(VOCAB, HIDDEN),
        torch.rand(HIDDEN),
        torch.rand(HIDDEN),
        1e-6,
        torch.randn(HIDDEN),
        VOCAB - 1,
        before,
    )
    requests = torch.tensor([2, 0, 1] if pending > K else [2, 0, 3])
    ours = kernel.draft_inputs(state, requests.to(device), pending, masks, moved(norms, device))
    theirs = reference.draft_inputs(twin(state), requests, pending, masks, norms)
    assert len(ours.x) == len(theirs.x) == len(requests) * (pending + masks)
    total = int(theirs.rows.counts.sum())
    for name in ("starts", "firsts", "counts", "positions", "writes"):
        same(getattr(ours.rows, name), getattr(theirs.rows, name))
    assert ours.rows.most == theirs.rows.most
    same(ours.reads, theirs.reads)
    same(ours.x[:total], theirs.x[:total])
    same(ours.stream[:total], theirs.stream[:total])


def test_verify_inputs(state: CycleState, device: torch.device) -> None:
    from peagle.ops.triton import cycle_state as kernel

    embedding, norm = torch.randn(VOCAB, HIDDEN), RMSNorm(HIDDEN, 1e-6)
    norm.weight = torch.nn.Parameter(torch.rand(HIDDEN), requires_grad=False)
    requests, drafts = torch.tensor([1, 3]), torch.tensor([[4, 5, 6], [7, 8, 9]])
    theirs = reference.verify_inputs(twin(state), requests, drafts, embedding, norm)
    given = (each.to(device) for each in (requests, drafts, embedding, norm))
    ours = kernel.verify_inputs(state, *given)
    for name in ("starts", "firsts", "counts", "positions", "writes"):
        same(getattr(ours[0], name), getattr(theirs[0], name))
    same(ours[1], theirs[1])
    same(ours[2], theirs[2])


@pytest.mark.parametrize("with_features", [False, True])
@pytest.mark.parametrize("count", [K, 2])
def test_commit(state: CycleState, device: torch.device, with_features: bool, count: int) -> None:
    from peagle.ops.triton import cycle_state as kernel

    requests = torch.tensor([0, 2, 1])
    drafts = torch.tensor([[4, 5, 6], [7, 8, 9], [1, 2, 3]])[:, :count].contiguous()
    chosen = torch.tensor([[4, 5, 9, 9], [7, 8, 9, 3], [-1, 2, 3, 4]])[:, : count + 1].contiguous()
    features = torch.randn(3 * (count + 1), HIDDEN) if with_features else None
    expected = twin(state)
    reference.commit(expected, requests, Path(drafts, chosen), features)
    moved_features = None if features is None else features.to(device)
    path = Path(drafts.to(device), chosen.to(device))
    kernel.advance(state, requests.to(device), path, moved_features)
    for name, column in columns(state).items():
        same(column, getattr(expected, name))


@pytest.mark.parametrize("waits", [False, True])
def test_commit_without_drafts(state: CycleState, device: torch.device, waits: bool) -> None:
    """With a drafter, what it has not seen waits, and the newest position comes behind it."""
    from peagle.ops.triton import cycle_state as kernel

    requests, drafts = torch.tensor([1, 0, 2]), torch.empty(3, 0, dtype=torch.int64)
    chosen = torch.tensor([[8], [9], [7]])
    features = torch.randn(3, HIDDEN) if waits else None
    expected, moved_features = twin(state), None if features is None else features.to(device)
    reference.commit(expected, requests, Path(drafts, chosen), features)
    path = Path(drafts.to(device), chosen.to(device))
    kernel.advance(state, requests.to(device), path, moved_features)
    for name, column in columns(state).items():
        same(column, getattr(expected, name))
    assert state.pending[[1, 0, 2]].tolist() == ([5, 2, 1] if waits else [1, 1, 1])
    newest = state.emitted.gather(1, state.pending[:, None] - 1)[:2, 0]
    assert newest.tolist() == [9, 8]


@pytest.mark.parametrize("vocab", [10, 5000, 20_000])
def test_argmax_takes_the_first_of_equals_and_names_nan(device: torch.device, vocab: int) -> None:
    from peagle.ops.triton import argmax as kernel

    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(2))
    logits[0, [3, vocab - 1]] = 9.0
    logits[2, vocab // 2] = float("nan")
    expected = [*logits[:2].argmax(dim=-1).tolist(), -1, int(logits[3].argmax())]
    assert expected[0] == 3
    assert kernel.argmax(logits.to(device)).tolist() == expected
    assert kernel.argmax(torch.full((2, vocab), float("-inf")).to(device)).tolist() == [0, 0]
    offsets = torch.arange(vocab) * 2
    shifted = kernel.argmax(logits.to(device), offsets.to(device)).tolist()
    assert shifted == [3 * max(token, 0) for token in expected]
