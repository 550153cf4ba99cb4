import pytest
import torch

from peagle.ops.penalties import Penalties
from peagle.ops.penalties import count_emitted as count_plainly
from peagle.ops.penalties import penalize as penalize_plainly

VOCAB, ROWS, DRAFTS = 301, 5, 3
RATES = [(1.3, 0.0, 0.0), (1.0, 0.0, 0.0), (0.8, 0.6, -0.2), (1.0, 0.0, 0.5), (1.0, -0.4, 0.0)]


@pytest.fixture
def penalties(device: torch.device) -> Penalties:
    torch.manual_seed(3)
    found = Penalties.none(ROWS, VOCAB, device)
    found.rates.copy_(torch.tensor(RATES))
    for row in range(ROWS):
        prompt, output = torch.randint(VOCAB, (2, 90), device=device)
        found.begin(row, prompt, output)
    return found


def on_cpu(penalties: Penalties) -> Penalties:
    return Penalties(penalties.rates.cpu(), penalties.counts.cpu().clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("drafts", "block"), [(0, 64), (DRAFTS, 64), (DRAFTS, 4096)])
def test_logits_are_the_reference_s(
    device: torch.device,
    penalties: Penalties,
    dtype: torch.dtype,
    drafts: int,
    block: int,
    monkeypatch,
) -> None:
    from peagle.ops.triton import penalties as kernel

    monkeypatch.setattr(kernel, "BLOCK", block)
    requests = torch.tensor([4, 0, 2, 1, 3, 0])
    proposed = torch.randint(VOCAB, (len(requests), drafts))
    proposed[:, 1:] = proposed[:, :1]  # the same token again counts again
    expected = (3 * torch.randn(len(requests) * (drafts + 1), VOCAB)).to(dtype)
    found = expected.clone().to(device)
    kernel.penalize(found, proposed.to(device), penalties, requests.to(device))
    before = expected.clone()
    penalize_plainly(expected, proposed, on_cpu(penalties), requests)
    # interpreted, numbers of 16 bits are cut where they should be rounded
    precision = 0.0 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.cpu(), expected, rtol=precision, atol=0.0)
    assert not torch.equal(before, expected)


def test_emitted_tokens_are_counted(device: torch.device, penalties: Penalties) -> None:
    from peagle.ops.triton import penalties as kernel

    requests, numbers = torch.tensor([2, 1, 0]), torch.tensor([4, 2, 1, 3, 3])
    emitted = torch.randint(VOCAB, (ROWS, DRAFTS + 1))
    emitted[0] = emitted[0, 0]  # four times the same
    expected = on_cpu(penalties)
    kernel.count_emitted(penalties, requests.to(device), emitted.to(device), numbers.to(device))
    count_plainly(expected, requests, emitted, numbers)
    assert torch.equal(penalties.counts.cpu(), expected.counts)
