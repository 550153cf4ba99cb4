"""The count of what other ways of drafting would give, on drafts made one prefix at a time."""

import itertools
import math

import pytest
import tiny
import torch
from count import chain, found_again, lookup_length, mean_length, oracle, tree, tree_length
from hypothesis import given
from hypothesis import strategies as st
from slots import Slots, slots_of

from peagle.config import SamplingParams
from peagle.drafters.methods import drafter_for
from peagle.drafters.selector import SelectorConfig
from peagle.train.packing import Document

K = 3
probabilities = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3).map(
    lambda shares: sorted((math.log(share / sum(shares)) for share in shares), reverse=True)
)


@given(st.lists(probabilities, min_size=1, max_size=3), st.integers(1, 12))
def test_a_tree_holds_the_most_probable_paths(scores: list[list[float]], nodes: int):
    whole = {
        path: sum(scores[depth][rank] for depth, rank in enumerate(path))
        for depth in range(1, len(scores) + 1)
        for path in itertools.product(range(3), repeat=depth)
    }
    best = sorted(whole.values(), reverse=True)[:nodes]
    found = tree([[row] * 3 for row in scores], nodes)
    assert sorted((whole[path] for path in found), reverse=True) == pytest.approx(best)
    assert all(path[:-1] in found for path in found if len(path) > 1)


def test_a_lookup_finds_what_followed_the_longest_match():
    text = [1, 2, 3, 9, 8, 5, 2, 3, 7, 7, 1, 2, 3]
    assert found_again(text, 2, 3) == [9, 8]
    assert found_again(text, 2, 4) == []
    assert found_again([4, 2, 3, 7, 7, 2, 3], 4, 2) == [7, 7, 2, 3]


def slots(drafts: list[int], wanted: list[int]) -> Slots:
    """One cycle whose slots each have three candidates: the draft, and the two ids after it."""
    tokens = torch.tensor(drafts)[:, None] + torch.arange(3)
    scores = torch.tensor([0.5, 0.3, 0.2]).log().expand(len(drafts), 3)
    text = [1, 50, 51, 1]
    columns = (tokens, scores, scores[:, None].repeat(1, 3, 1), tokens[:, 0])
    return Slots(*(c[None] for c in columns), torch.tensor([wanted]), torch.tensor([4]), text)


def test_a_tree_follows_what_a_selector_says_after_each_draft():
    """After the second candidate of slot 0 the third of slot 1 is the best, else the first."""
    shares = torch.tensor([0.5, 0.3, 0.2]).log()
    after = shares.repeat(2, 3, 1)
    after[1, 1] = shares.flip(0)
    found = tree(after.tolist(), 4)
    assert found == {(0,), (1,), (0, 0), (2,)}
    assert (1, 2) in tree(after.tolist(), 6)
    assert (1, 0) not in tree(after.tolist(), 6)


def test_slots_know_the_scores_after_each_candidate(targets, tmp_path):
    """The best one after the best one is what the engine drafts."""
    target, selector = targets["easy"].decoder, SelectorConfig(rank=8, candidates=4)
    config = tiny.drafter_config(True, draft_vocab=30, selector=selector)
    model = tiny.random_drafter_for(target, tmp_path / "drafter", config).model
    model.readout.selector.predecessor.mul_(10)
    found = slots_of(target, model, Document.answered([5, 9, 3, 1, 7, 2, 8, 4], 2), K, 4)
    corrected = 0
    for cycle in range(len(found.wanted)):
        place, path = 0, []
        for slot in range(K):
            place = int(found.after[cycle, slot, place].argmax())
            path.append(int(found.tokens[cycle, slot, place]))
        assert path == found.drafts[cycle].tolist()
        corrected += path != found.tokens[cycle, :, 0].tolist()
    assert corrected > 0


def test_what_each_way_would_have_had_accepted():
    case = slots([10, 20, 30], [10, 21, 30])
    assert (chain(case, 0), oracle(case, 0)) == (2, 4)
    assert [tree_length(case, 0, nodes) for nodes in (1, 3, 39)] == [2, 2, 4]
    assert chain(slots([10, 20, 30], [10, 20, 9]), 0, k=1) == 2
    assert lookup_length(slots([10, 20, 30], [50, 51, 1]), 0, 1) == 4
    assert lookup_length(slots([10, 20, 30], [10, 51, 1]), 0, 2) == 2


def test_slots_hold_what_the_engine_drafts(targets, trained):
    target, drafter = targets["easy"].decoder, drafter_for(trained["peagle"].trainer.model)
    engine = tiny.engine(target, None, 0, False, tiny.engine_config())
    (request,) = tiny.run(engine, [[5, 9]], SamplingParams(max_tokens=20))
    found = slots_of(target, drafter.model, Document.answered(request.tokens, 2), K, 4)
    assert found.newest.tolist() == list(range(2, 23 - K))
    for cycle, known in enumerate(found.newest.tolist()):
        drafts = tiny.propose(drafter, target, request.tokens[:known], K).drafts
        assert found.tokens[cycle, :, 0].tolist() == drafts == found.drafts[cycle].tolist()
        assert found.wanted[cycle].tolist() == request.tokens[known : known + K]
    assert 1.0 < mean_length([found], chain) <= mean_length([found], oracle)
