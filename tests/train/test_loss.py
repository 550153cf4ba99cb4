import pytest
import tiny
import torch
from scipy.special import log_softmax

from peagle.train import loss
from peagle.train.loss import LOSSES, Comparison


def setup(target, draft_vocab: int = tiny.VOCAB):
    model = tiny.random_drafter(tiny.drafter_config(parallel=True, draft_vocab=draft_vocab))
    hidden = torch.randn(23, 64, requires_grad=True)
    return model, hidden, torch.randn(23, 64), torch.rand(23)


@pytest.mark.parametrize("rule", LOSSES)
@pytest.mark.parametrize("draft_vocab", [tiny.VOCAB, 30])
def test_losses_equal_their_definition(target, rule: str, draft_vocab: int):
    """Over the draft vocabulary; agreement is over the whole."""
    model, hidden, final, weights = setup(target, draft_vocab)
    result = Comparison(model, target.decoder, LOSSES[rule])(hidden, final, weights)
    kept = (torch.arange(draft_vocab) + model.d2t).numpy()
    with torch.no_grad():
        draft = log_softmax(model.logits(hidden).double().numpy(), axis=-1)
        whole = target.decoder.head(final).double().numpy()
    wanted = log_softmax(whole[:, kept], axis=-1)
    total = 0.0
    for row in range(23):
        p, q = wanted[row], draft[row]
        value = (2.718281828459045**p * (p - q)).sum() if rule == "kl" else -q[p.argmax()]
        total += float(weights[row]) * float(value)
    assert result.total.item() == pytest.approx(total, rel=1e-4)
    agrees = [kept[draft[row].argmax()] == whole[row].argmax() for row in range(23)]
    assert result.agrees.tolist() == agrees


@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_chunks_change_neither_loss_nor_gradient(
    target, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    model, hidden, final, weights = setup(target)
    compare = Comparison(model, target.decoder, LOSSES["kl"])
    whole = compare(hidden, final, weights)
    (gradient,) = torch.autograd.grad(whole.total, hidden)
    monkeypatch.setattr(loss, "CHUNK", chunk)
    parts = compare(hidden, final, weights)
    torch.testing.assert_close(parts.total, whole.total)
    torch.testing.assert_close(torch.autograd.grad(parts.total, hidden)[0], gradient)
    assert torch.equal(parts.agrees, whole.agrees)


def test_no_charged_element_is_no_loss(target):
    model, hidden, final, weights = setup(target)
    compare = Comparison(model, target.decoder, LOSSES["kl"])
    result = compare(hidden[:0], final[:0], weights[:0])
    result.total.backward()
    assert (result.total.item(), len(result.agrees)) == (0.0, 0)
