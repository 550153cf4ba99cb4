import pytest
import torch
from torch import Tensor

from peagle.ops.sampling import Sampling
from peagle.ops.sampling import sample_requests as reference

VOCAB = 301
EACH = 3 if torch.cuda.is_available() else 1
"""Rows of each request: one takes the interpreter most of a second."""
PARAMS = ("temperature", "top_k", "top_p", "min_p")
FILTERS = (
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.7, 0, 0.8, 0.0),
    (0.9, 7, 1.0, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.3, 200, 0.99, 0.01),
    (1.0, VOCAB + 5, 0.3, 0.0),
    (1.0, 1, 0.5, 0.0),
    (0.0, 5, 0.5, 0.0),
    (1e-4, 0, 0.9, 0.0),
    (1.0, 4, 1e-6, 1.0),
)


def table(settings: tuple[tuple[float, ...], ...]) -> Sampling:
    columns = dict(zip(PARAMS, torch.tensor(settings).T.contiguous(), strict=True))
    columns["top_k"] = columns["top_k"].long()
    return Sampling(**columns, seeds=torch.arange(len(settings)) * 7919 - 3)


def both(logits: Tensor, device: torch.device, settings=FILTERS) -> tuple[Tensor, Tensor]:
    """The kernel's tokens and the reference's; as many rows for each request of the settings."""
    from peagle.ops.triton import sampling as kernel

    known = table(settings)
    requests = torch.arange(len(settings)).flip(0)
    firsts = torch.arange(len(settings)) * 31
    expected = reference(logits, known, requests, firsts)
    there = Sampling(**{name: column.to(device) for name, column in known._asdict().items()})
    rest = requests.to(device), firsts.to(device)
    found = kernel.sample_requests(logits.to(device), there, *rest)
    return found.cpu(), expected


@pytest.mark.parametrize(
    ("dtype", "block"),
    [(torch.float32, 128), (torch.float32, 512), (torch.bfloat16, 512), (torch.float16, 512)],
)
def test_tokens_are_the_reference_s(
    device: torch.device, dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peagle.ops.triton import sampling as kernel

    monkeypatch.setattr(kernel, "BLOCK", block)
    torch.manual_seed(block)
    logits = (3 * torch.randn(EACH * len(FILTERS), VOCAB)).to(dtype)
    found, expected = both(logits, device)
    assert found.tolist() == expected.tolist()
    assert len(set(expected.tolist())) > len(FILTERS) // 2


def test_equal_logits_stay_in_the_order_of_the_vocabulary(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-3, 4, (EACH * len(FILTERS), VOCAB)).float()
    logits[::3] *= -0.0
    found, expected = both(logits, device)
    assert found.tolist() == expected.tolist()


def test_draws_follow_the_probabilities(device: torch.device) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(500, 1)
    found, expected = both(logits, device, ((1.0, 0, 1.0, 0.0),))
    assert found.tolist() == expected.tolist()
    shares = torch.bincount(found, minlength=4) / 500
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.06, rtol=0)


def test_what_is_masked_is_never_drawn(device: torch.device) -> None:
    torch.manual_seed(1)
    settings = FILTERS[:7]
    logits = torch.randn(2 * EACH * len(settings), VOCAB)
    logits[:, 5:] = float("-inf")
    found, expected = both(logits, device, settings)
    assert found.tolist() == expected.tolist()
    assert int(found.max()) < 5


def test_rows_that_are_no_numbers_keep_their_mark(device: torch.device) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 4] = float("nan")
    found, _ = both(logits, device, ((1.0, 3, 0.9, 0.0),))
    assert found[1] == -1
    assert int(found[[0, 2]].min()) >= 0


def test_rows_at_given_depths(device: torch.device):
    """Rows of one depth draw alike, whatever their order."""
    from peagle.ops.triton import sampling as kernel

    known, requests = table(FILTERS[:2]), torch.tensor([1, 0])
    logits = torch.randn(1, VOCAB).expand(6, -1).contiguous() * 2
    depths = torch.tensor([0, 1, 1, 0, 2, 1])
    firsts = torch.tensor([5, 40])
    wanted = reference(logits, known, requests, firsts, depths)
    how = Sampling(**{name: column.to(device) for name, column in known._asdict().items()})
    rest = [each.to(device) for each in (requests, firsts, depths)]
    assert torch.equal(kernel.sample_requests(logits.to(device), how, *rest).cpu(), wanted)
    assert wanted[1] == wanted[2]
    assert wanted[:3].unique().numel() == 2
