"""The estimates of a training run, against proposals made one prefix at a time."""

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.drafters.methods import drafter_for
from peagle.engine.engine import Engine
from peagle.train.estimate import Estimate, walked_length
from peagle.train.features import TargetFeatures
from peagle.train.packing import Document, pack
from peagle.train.trainer import Trainer

K = 4


@pytest.fixture(scope="module")
def documents(targets) -> list[Document]:
    """Greedy text of the easy target, so that every true token is the target's choice.

    In some of it, a few tokens are no response.
    """
    prompts = [[5, 9 + i] for i in range(3)]
    engine = Engine(targets["easy"].decoder, None, 0, tiny.engine_config())
    requests = tiny.run(engine, prompts, SamplingParams(max_tokens=20))
    responses = [((2, 22),), ((2, 9), (12, 22)), ((2, 6), (7, 22))]
    texts = (tuple(request.tokens) for request in requests)
    return [Document(text, parts) for text, parts in zip(texts, responses, strict=True)]


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_estimates_are_what_the_drafter_would_do(targets, trained, documents, method: str):
    """Accuracy per depth over every prefix, and AL along the walk from cycle to cycle."""
    run, target = trained[method], targets["easy"]
    drafter = drafter_for(run.trainer.model)
    agreeing = [[0.0] * K for _ in range(2)]
    emitted = []
    for document in documents:
        begin = 0
        tokens = list(document.tokens)
        choices = tiny.run_target(target.decoder, tokens)[0].argmax(dim=-1).tolist()
        for anchor in range(len(tokens) - 2):
            drafts = tiny.propose(drafter, target.decoder, tokens[: anchor + 2], K).drafts
            ends = (last for first, last in document.responses if first <= anchor + 2 < last)
            wanted = choices[anchor + 1 : next(ends, anchor + 2) - 1]
            right = [draft == choice for draft, choice in zip(drafts, wanted, strict=False)]
            for depth, correct in enumerate(right):
                agreeing[correct][depth] += 1
            if anchor == begin and len(right) == K:
                emitted.append([*right, False].index(False) + 1)
                begin += emitted[-1]
            elif anchor == begin:
                begin += 1
    rows = pack(documents, 80)
    source = TargetFeatures(target.decoder, drafter.model.config.taps)
    trainer = Trainer(run.trainer.recipe, target.decoder, drafter.model, rows, rows, source)
    estimate = trainer.estimate()
    assert estimate.acceptance_length == pytest.approx(sum(emitted) / len(emitted))
    accuracy = [right / (right + wrong) for wrong, right in zip(*agreeing, strict=True)]
    exact = K if method == "peagle" else 1  # EAGLE-3 is asked with the true token, not its draft
    assert estimate.accuracy[:exact] == pytest.approx(accuracy[:exact])
    assert estimate.acceptance_length > 1.3, "too weak a drafter to show anything"


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize(("length", "rows_per_pass", "limit"), [(22, 1, 7), (50, 2, 1), (22, 2, 9)])
def test_estimates_do_not_depend_on_the_passes(
    targets, trained, documents, method: str, length: int, rows_per_pass: int, limit: int
):
    run, target = trained[method].trainer, targets["easy"].decoder
    whole, parts = pack(documents, 80), pack(documents, length)
    changes = {"rows_per_pass": rows_per_pass, "elements_per_segment": limit}
    recipe = run.recipe.model_copy(update=changes)
    source = TargetFeatures(target, run.model.config.taps)
    found = Trainer(recipe, target, run.model, parts, parts, source).estimate()
    expected = Trainer(run.recipe, target, run.model, whole, whole, source).estimate()
    assert (found.accuracy, found.acceptance_length) == (
        expected.accuracy,
        expected.acceptance_length,
    )
    assert found.drawn_accuracy == pytest.approx(expected.drawn_accuracy, rel=1e-4)
    assert found.drawn_acceptance_length == pytest.approx(
        expected.drawn_acceptance_length, rel=1e-4
    )


@given(st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=30))
def test_the_walk_goes_from_one_whole_chain_to_the_next(chains: list[list[bool]]):
    """Two batches, in which each anchor's chain says depth by depth whether they agree."""
    batches, expected = [chains, [[True, False, True]]], []
    tables = [torch.tensor([[*chain, -1, -1, -1][:3] for chain in batch]) for batch in batches]
    for batch in batches:
        anchor = 0
        while anchor < len(batch):
            whole = len(batch[anchor]) == 3
            expected += [[*batch[anchor], False].index(False) + 1] if whole else []
            anchor += expected[-1] if whole else 1
    estimate = Estimate.of((table, table.float()) for table in tables)
    assert estimate.drawn_acceptance_length == pytest.approx(estimate.acceptance_length)
    assert estimate.drawn_accuracy == pytest.approx(estimate.accuracy)
    assert estimate.acceptance_length == pytest.approx(sum(expected) / len(expected))
    for depth, share in enumerate(estimate.accuracy):
        said = [chain[depth] for batch in batches for chain in batch if len(chain) > depth]
        assert share == pytest.approx(sum(said) / len(said))


def test_nothing_asked_is_nothing_accepted():
    nothing = torch.full((10, 3), -1)
    none = (0.0, 0.0, 0.0)
    assert Estimate.of([(nothing, nothing.float())]) == Estimate(none, 1.0, none, 1.0)


@given(st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=1, max_size=4))
def test_the_length_when_drawing_is_that_of_all_walks(chances: list[list[float]]):
    """Every walk through a few anchors is followed, with its probability."""

    def walks(anchor: int) -> tuple[float, float]:
        """Expected tokens and cycles from an anchor on."""
        if anchor >= len(chances):
            return 0.0, 0.0
        first, second = chances[anchor]
        ends = [1 - first, first * (1 - second), first * second]
        further = [walks(anchor + accepted + 1) for accepted in range(3)]
        tokens = sum(
            p * (i + 1 + more[0]) for i, (p, more) in enumerate(zip(ends, further, strict=True))
        )
        return tokens, 1 + sum(p * more[1] for p, more in zip(ends, further, strict=True))

    tokens, cycles = walks(0)
    assert walked_length([torch.tensor(chances)]) == pytest.approx(tokens / cycles)
