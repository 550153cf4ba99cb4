"""Loss and gradient in one kernel against torch's."""

import pytest
import torch

from peagle.ops.divergence import LOSSES, weigh


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("vocab", [7, 64, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_the_references(
    device: torch.device, loss: str, vocab: int, dtype: torch.dtype
):
    """Of rows of which several ask for the same, and of one that is told nothing apart."""
    draft, target, which, weights = drawn(vocab, dtype)
    draft[0] = 1.0
    expected, wanted = weigh(loss, draft.clone(), target, which, weights)
    there = (part.to(device) for part in (draft, target, which, weights))
    total, gradient = kernel(loss, *there)
    torch.testing.assert_close(total.cpu(), expected, rtol=2e-5, atol=1e-5)
    slack = 1e-6 if dtype == torch.float32 else 1e-4
    torch.testing.assert_close(gradient.cpu(), wanted, rtol=1e-5 + 80 * slack, atol=slack)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("loss", LOSSES)
def test_far_logits_neither_overflow_nor_vanish(device: torch.device, loss: str):
    draft, target, which, weights = drawn(40, torch.float32)
    draft[:, 3] += 1e4
    target[:, 9] += 1e4
    expected, wanted = weigh(loss, draft.clone(), target, which, weights)
    there = (part.to(device) for part in (draft, target, which, weights))
    total, gradient = kernel(loss, *there)
    torch.testing.assert_close(total.cpu(), expected)
    torch.testing.assert_close(gradient.cpu(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_logit_that_is_not_a_number_is_no_loss(device: torch.device, loss: str):
    draft, target, which, weights = (part.to(device) for part in drawn(40, torch.float32))
    draft[2, 5] = float("nan")
    total, _ = kernel(loss, draft, target, which, weights)
    assert total.isnan()


def test_of_equally_likely_tokens_the_first_is_wanted(device: torch.device):
    draft = torch.randn(1, 5000)
    target = torch.zeros(1, 5000)
    target[0, [4500, 40, 4100]] = 3.0
    which, weights = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    expected = -draft.log_softmax(dim=-1)[0, 40]
    there = (part.to(device) for part in (draft, target, which, weights))
    total, _ = kernel("cross_entropy", *there)
    torch.testing.assert_close(total.cpu(), expected)


def kernel(
    loss: str,
    draft: torch.Tensor,
    target: torch.Tensor,
    which: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel, on whatever device."""
    from peagle.ops.triton import divergence

    return divergence.weigh(loss, draft, target, which, weights)


def drawn(
    vocab: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of 9 rows and 4 places, who asks for which, and weights."""
    torch.manual_seed(vocab)
    draft, target = (3 * torch.randn(size, vocab).to(dtype) for size in (9, 4))
    return draft, target, torch.randint(4, (9,)), torch.rand(9)
