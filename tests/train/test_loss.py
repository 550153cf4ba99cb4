from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from scipy.special import log_softmax
from torch import Tensor
from torch.nn import functional as F

from peagle.drafters.model import DraftModel
from peagle.drafters.selector import SelectorConfig
from peagle.ops.acceptance import shared_draw
from peagle.ops.divergence import LOSSES
from peagle.train import loss
from peagle.train.cod import Elements
from peagle.train.loss import Comparison, pace

ELEMENTS, LENGTH = 23, 15


@dataclass
class Case:
    """Elements of a drafter, several of which predict the same token."""

    model: DraftModel
    target: Any
    hidden: Tensor
    final: Tensor
    places: Tensor
    weights: Tensor

    def loss(self, rule: str) -> Tensor:
        compare = Comparison(self.model, self.target, rule)
        return compare.loss(self.hidden, self.final, self.places, self.weights)

    def agrees(self) -> Tensor:
        compare = Comparison(self.model, self.target, "kl")
        read = torch.full_like(self.places, -1)
        return compare.judge(self.hidden, self.final, self.places, read)[0]

    def plain_loss(self, rule: str) -> Tensor:
        """Computed with torch's own losses, without chunks."""
        kept = torch.arange(self.model.config.draft_vocab_size) + self.model.readout.d2t
        draft = self.model.readout.logits(self.hidden)
        wanted = (self.final @ self.target.head.weight.T)[self.places][:, kept]
        if rule == "cross_entropy":
            losses = F.cross_entropy(draft, wanted.argmax(dim=-1), reduction="none")
            return losses @ self.weights
        shares, ours = wanted.softmax(dim=-1), draft.softmax(dim=-1)
        return F.kl_div(ours.log(), shares, reduction="none").sum(dim=-1) @ self.weights

    def gradients(self, total: Tensor) -> list[Tensor]:
        """Gradients of everything that is trained, at some weight of the loss."""
        leaves = (self.hidden, self.model.readout.head.weight, self.model.readout.norm.weight)
        return list(torch.autograd.grad(total * 3.0, [p for p in leaves if p.requires_grad]))


def case(target, draft_vocab: int = tiny.VOCAB) -> Case:
    return Case(
        tiny.random_drafter(tiny.drafter_config(parallel=True, draft_vocab=draft_vocab)),
        target.decoder,
        torch.randn(ELEMENTS, 64, requires_grad=True),
        torch.randn(LENGTH, 64),
        torch.randint(LENGTH, (ELEMENTS,)),
        torch.rand(ELEMENTS),
    )


@pytest.mark.parametrize("rule", LOSSES)
@pytest.mark.parametrize("draft_vocab", [tiny.VOCAB, 30])
@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_losses_equal_their_definition(targets, rule: str, draft_vocab: int, family: str):
    """Over the draft vocabulary; agreement is over the full one. Gemma 4's logits are capped."""
    target = targets[family]
    drawn = case(target, draft_vocab)
    kept = (torch.arange(draft_vocab) + drawn.model.readout.d2t).numpy()
    with torch.no_grad():
        draft = log_softmax(drawn.model.readout.logits(drawn.hidden).double().numpy(), axis=-1)
        whole = target.decoder.head(drawn.final).double().numpy()[drawn.places]
    if family == "gemma4":
        whole = 3.0 * np.tanh(whole / 3.0)
    wanted = log_softmax(whole[:, kept], axis=-1)
    total = 0.0
    for row in range(ELEMENTS):
        p, q = wanted[row], draft[row]
        values = {"kl": (np.exp(p) * (p - q)).sum(), "cross_entropy": -q[p.argmax()]}
        total += float(drawn.weights[row]) * float(values[rule])
    assert drawn.loss(rule).item() == pytest.approx(total, rel=1e-4)
    agrees = [kept[draft[row].argmax()] == whole[row].argmax() for row in range(ELEMENTS)]
    assert drawn.agrees().tolist() == agrees


@pytest.mark.parametrize("draft_vocab", [tiny.VOCAB, 30])
def test_a_drafter_like_the_target_agrees_where_it_has_the_token(target, draft_vocab: int):
    drawn = case(target, draft_vocab)
    kept = torch.arange(draft_vocab) + drawn.model.readout.d2t
    with torch.no_grad():
        drawn.model.readout.norm.weight.fill_(1.0)
        drawn.model.readout.head.weight.copy_(target.decoder.head.weight[kept])
        drawn.hidden.copy_(drawn.final[drawn.places])
        best = target.decoder.head(drawn.final)[drawn.places].argmax(dim=-1)
    agrees = torch.isin(best, kept)
    assert torch.equal(drawn.agrees(), agrees)
    assert agrees.any()
    assert agrees.all() == (draft_vocab == tiny.VOCAB)


@pytest.mark.parametrize("rule", LOSSES)
@pytest.mark.parametrize("draft_vocab", [tiny.VOCAB, 30])
@pytest.mark.parametrize("train_head", [True, False])
def test_gradients_are_those_of_the_definition(
    target, rule: str, draft_vocab: int, train_head: bool
):
    """They are written out by hand, and taken chunk by chunk in the forward pass."""
    drawn = case(target, draft_vocab)
    drawn.model.readout.head.requires_grad_(train_head)
    total, plain = drawn.loss(rule), drawn.plain_loss(rule)
    torch.testing.assert_close(total, plain)
    found, expected = drawn.gradients(total), drawn.gradients(plain)
    assert len(found) == 2 + train_head
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_chunks_change_neither_loss_nor_gradient(
    target, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    drawn = case(target)
    whole, agrees = drawn.loss("kl"), drawn.agrees()
    gradients = drawn.gradients(whole)
    monkeypatch.setattr(loss, "chunk_rows", lambda vocabulary: chunk)
    parts = drawn.loss("kl")
    torch.testing.assert_close(parts, whole)
    for ours, theirs in zip(drawn.gradients(parts), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(drawn.agrees(), agrees)


@pytest.mark.parametrize("rule", LOSSES)
def test_bfloat16_elements_are_compared_in_float32(targets, rule: str):
    """With 64 times as many, a bfloat16 sum would lose some."""
    exact = case(targets["qwen3"])
    rough = replace(
        exact,
        model=tiny.random_drafter(exact.model.config).bfloat16(),
        target=tiny.load_target(targets["qwen3"].directory, torch.bfloat16),
        hidden=exact.hidden.detach().bfloat16().requires_grad_(),
        final=exact.final.bfloat16(),
    )
    total = rough.loss(rule)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact.loss(rule).item(), rel=0.02)
    assert {g.dtype for g in rough.gradients(total)} == {torch.bfloat16}
    parts = (torch.cat([part] * 64) for part in (rough.hidden, rough.places, rough.weights))
    many = replace(rough, **dict(zip(("hidden", "places", "weights"), parts, strict=True)))
    assert many.loss(rule).item() == pytest.approx(64 * total.item(), rel=1e-4)


def test_no_elements_give_no_loss(target):
    drawn = case(target)
    drawn.hidden = drawn.hidden[:0]
    drawn.places, drawn.weights = drawn.places[:0], drawn.weights[:0]
    total = drawn.loss("kl")
    total.backward()
    assert (total.item(), len(drawn.agrees())) == (0.0, 0)
    assert not drawn.model.readout.head.weight.grad.any()


def test_a_selector_learns_the_target_s_order_of_its_candidates(target):
    """By gradients that reach nothing but itself and the hidden states; rows that have read the
    token before them teach nothing."""
    drawn = case(target)
    config = replace(drawn.model.config, selector=SelectorConfig(rank=6, candidates=5))
    drawn.model = tiny.random_drafter(config)
    compare, previous = Comparison(drawn.model, drawn.target, "kl"), torch.arange(ELEMENTS) % 7 - 1
    asked = drawn.hidden, drawn.final, drawn.places, drawn.weights, previous
    total = compare.selector_loss(*asked)
    readout = drawn.model.readout
    found, scores = readout(drawn.hidden, previous)
    wanted = target.decoder.head(drawn.final)[drawn.places].gather(1, found.tokens).softmax(dim=-1)
    losses = -(wanted * scores.log_softmax(dim=-1)).sum(dim=-1)
    torch.testing.assert_close(total, losses @ (drawn.weights * (previous >= 0)))
    total.backward()
    assert readout.head.weight.grad is None
    assert all(p.grad.any() for p in readout.selector.parameters())
    assert not drawn.hidden.grad[previous < 0].any()
    assert drawn.hidden.grad[previous >= 0].any(dim=1).all()


def test_what_is_judged_is_what_would_be_drafted(target):
    """The most likely candidate, and how often both draw the same one."""
    drawn = case(target)
    compare = Comparison(drawn.model, drawn.target, "kl")
    asked = drawn.hidden, drawn.final, drawn.places, torch.full((ELEMENTS,), -1)
    agrees, alike = compare.judge(*asked)
    found, scores = drawn.model.readout(drawn.hidden, torch.full((ELEMENTS,), -1))
    logits = target.decoder.head(drawn.final)[drawn.places]
    best = found.tokens.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
    assert torch.equal(agrees, best == logits.argmax(dim=-1))
    expected = shared_draw(logits.softmax(dim=-1).gather(1, found.tokens), scores.softmax(dim=-1))
    torch.testing.assert_close(alike, expected.float())
    assert 0 < alike.min() < alike.max() < 1


def test_confidence_is_the_probability_of_the_target_s_choice(target):
    drawn = case(target, 30)
    compare = Comparison(drawn.model, drawn.target, "kl")
    kept = torch.arange(30) + drawn.model.readout.d2t
    best = (drawn.final @ target.decoder.head.weight.T)[:, kept].argmax(dim=-1)[drawn.places]
    with torch.no_grad():
        shares = drawn.model.readout.logits(drawn.hidden).softmax(dim=-1)
    found = compare.confidence(drawn.hidden, drawn.final, drawn.places)
    torch.testing.assert_close(found, shares[torch.arange(ELEMENTS), best])


def test_elements_weigh_what_is_expected_to_be_accepted_through_them():
    """Two chains, of three elements and of one, in any order."""
    anchors, depths = torch.tensor([4, 9, 4, 4]), torch.tensor([1, 0, 0, 2])
    confidence = torch.tensor([0.5, 0.2, 0.9, 0.4])
    a, b, c, alone = (0.5 * q + 0.5 for q in (0.9, 0.5, 0.4, 0.2))
    reached = [a * b + a * b * c, alone, a + a * b + a * b * c, a * b * c]
    mean = sum(reached) / 4
    found = pace(confidence, Elements(anchors, depths), 0.5)
    assert found.tolist() == pytest.approx([weight / mean for weight in reached])


def test_a_pass_may_have_no_elements():
    none = torch.empty(0, dtype=torch.int64)
    assert len(pace(torch.empty(0), Elements(none, none), 0.5)) == 0


def test_with_full_smoothing_a_depth_weighs_what_follows_it():
    elements = Elements(torch.tensor([0, 0, 0]), torch.arange(3))
    assert pace(torch.rand(3), elements, 1.0).tolist() == pytest.approx([1.5, 1.0, 0.5])
