"""Lookups in texts: the kernels and their twins."""

import pytest
import torch

from peagle.ops import lookup
from peagle.ops.acceptance import Path
from peagle.ops.cycle_state import CycleState
from peagle.ops.draft import Found

ROWS, POSITIONS, LONGEST = 5, 120, 6
COUNTS = (1, 3, 50, 120, 87)


def texts() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 3, (ROWS, POSITIONS), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize(("shortest", "drafts", "block"), [(1, 1, 16), (3, 7, 16), (6, 5, 128)])
def test_the_same_is_found(device, monkeypatch, shortest: int, drafts: int, block: int):
    from peagle.ops.triton import lookup as kernel

    monkeypatch.setattr(kernel, "BLOCK", block)
    requests = torch.tensor([3, 0, 2, 1, 4, 3])
    counts = torch.tensor([COUNTS[row] for row in requests])
    gains = torch.linspace(-1, 1, LONGEST + 1)
    given = texts(), requests, counts
    expected = lookup.look_up(*given, drafts, shortest, gains)
    moved = (x.to(device) for x in given)
    tokens, lengths, used = kernel.look_up(*moved, drafts, shortest, gains.to(device))
    assert tokens.tolist() == expected.tokens.tolist()
    assert lengths.tolist() == expected.lengths.tolist()
    assert used.tolist() == expected.used.tolist()
    assert len(set(expected.lengths.tolist())) > 1, "some match, some do not"


def test_the_newest_tokens_are_added(device):
    from peagle.ops.triton import lookup as kernel

    emitted = torch.arange(ROWS * 7).view(ROWS, 7)
    computed, pending = torch.tensor([5, 1, 119, 60, 0]), torch.tensor([6, 1, 4, 7, 1])
    requests = torch.tensor([4, 2, 0, 3, 2])

    def state_on(where: torch.device) -> CycleState:  # a kernel is given all of it
        known = [tensor.to(where) for tensor in (computed, pending, emitted)]
        empty = CycleState.empty(known[2], known[0], torch.zeros(ROWS, 7, 1, device=where), 9, 3)
        return empty._replace(computed=known[0], pending=known[1], emitted=known[2])

    expected, found = texts(), texts().to(device)
    lookup.write_newest(expected, state_on(torch.device("cpu")), requests)
    kernel.write_newest(found, state_on(device), requests.to(device))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("price", [0.5, 2.0])
def test_matches_are_weighed_alike(device, price: float):
    from peagle.ops.triton import lookup as kernel

    generator = torch.Generator().manual_seed(1)
    tokens, drafts = (torch.randint(0, 2, (9, 4), generator=generator) for _ in range(2))
    chosen = torch.randint(0, 2, (9, 5), generator=generator)
    lengths = torch.randint(0, LONGEST + 1, (9,), generator=generator)
    expected = torch.linspace(-1, 1, LONGEST + 1)
    found = expected.to(device, copy=True)
    lookup.weigh(expected, Found(tokens, lengths, lengths > 0), Path(drafts, chosen), price)
    tokens, lengths, drafts, chosen = (x.to(device) for x in (tokens, lengths, drafts, chosen))
    kernel.weigh(found, Found(tokens, lengths, lengths > 0), Path(drafts, chosen), price)
    torch.testing.assert_close(found.cpu(), expected)
