"""The estimates of a training run, against proposals made one prefix at a time."""

import pytest
import tiny

from peagle.config import SamplingParams
from peagle.engine.engine import Engine
from peagle.train.estimate import Agreement
from peagle.train.packing import Document, pack
from peagle.train.trainer import Trainer

K = 4


@pytest.fixture(scope="module")
def documents(targets) -> list[Document]:
    """Greedy text of the easy target, so that every true token is the target's choice."""
    prompts = [[5, 9 + i] for i in range(3)]
    engine = Engine(targets["easy"].decoder, None, 0, tiny.engine_config())
    requests = tiny.run(engine, prompts, SamplingParams(max_tokens=20))
    return [Document.answered(tuple(request.tokens), 2) for request in requests]


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_estimates_are_what_the_drafter_would_do(targets, trained, documents, method: str):
    """Accuracy per depth over every prefix, and AL along the walk from cycle to cycle."""
    run, target = trained[method], targets["easy"]
    drafter = tiny.as_drafter(run.trainer.model)
    agreeing = [[0.0] * K for _ in range(2)]
    emitted = []
    for document in documents:
        begin = 0
        tokens = list(document.tokens)
        choices = tiny.run_target(target.decoder, tokens)[0].argmax(dim=-1).tolist()
        for anchor in range(len(tokens) - 2):
            drafts = tiny.propose(drafter, target.decoder, tokens[: anchor + 2], K).drafts
            right = [
                draft == choice
                for draft, choice in zip(
                    drafts, choices[anchor + 1 : len(tokens) - 1], strict=False
                )
            ]
            for depth, correct in enumerate(right):
                agreeing[correct][depth] += 1
            if len(right) == K and anchor == begin:
                emitted.append([*right, False].index(False) + 1)
                begin += emitted[-1]
    rows = pack(documents, 80)
    trainer = Trainer(run.trainer.recipe, target.decoder, drafter.model, rows, rows)
    estimate = trainer.estimate()
    assert estimate.acceptance_length == pytest.approx(sum(emitted) / len(emitted))
    accuracy = [right / (right + wrong) for wrong, right in zip(*agreeing, strict=True)]
    exact = K if method == "peagle" else 1  # EAGLE-3 is asked with the true token, not its draft
    assert estimate.accuracy[:exact] == pytest.approx(accuracy[:exact])
    assert estimate.acceptance_length > 1.3, "too weak a drafter to show anything"


def test_nothing_seen_is_nothing_accepted():
    agreement = Agreement(3)
    agreement.begin(10)
    estimate = agreement.estimate()
    assert estimate.accuracy == (0.0, 0.0, 0.0)
    assert estimate.acceptance_length == 1.0
