"""Counts of a batch small enough to count by hand."""

import pytest
import torch

from peagle.train.cod import Chains
from peagle.train.packing import Document, pack
from peagle.train.work import Work

TOKENS = tuple(range(12))


def count(recipe, documents) -> Work:
    """One pass of whole chains over one row."""
    rows = pack(documents, sum(len(document.tokens) for document in documents))
    batch = rows.batch(torch.arange(1))
    chains = Chains.whole(batch, recipe.num_speculative_tokens)
    return Work.of(recipe, [(batch, chains)], recipe.elements_per_segment or 6144)


def test_one_document(recipe_for, tmp_path):
    """Tokens 3 to 11 are a response: anchors 1 to 9 are in the loss at depth 0, 1 to 8 at 1, ..."""
    work = count(
        recipe_for(tmp_path, num_speculative_tokens=3), [Document.answered(TOKENS, prompt_length=3)]
    )
    assert work == Work(
        tokens=12,
        loss_elements=(9, 8, 7),
        deeper=15,
        target_pairs=sum(range(1, 13)),
        draft_pairs=sum(range(1, 13)) + sum(range(3, 11)) + sum(range(4, 11)),
        largest_pass=12,
        largest_segment=15,
    )


def test_documents_do_not_see_each_other(recipe_for, tmp_path):
    recipe = recipe_for(tmp_path, num_speculative_tokens=1)
    halves = [Document.answered(TOKENS[:6], 1), Document.answered(TOKENS[6:], 1)]
    assert count(recipe, halves).target_pairs == 2 * sum(range(1, 7))


@pytest.mark.parametrize(("limit", "largest"), [(15, 15), (14, 8), (5, 5), (4, 4)])
def test_segments_are_equal_parts(recipe_for, tmp_path, limit: int, largest: int):
    recipe = recipe_for(tmp_path, num_speculative_tokens=3, elements_per_segment=limit)
    assert count(recipe, [Document.answered(TOKENS, 3)]).largest_segment == largest


def test_eagle3_unrolls_every_token_and_keeps_every_depth(recipe_for, tmp_path):
    recipe = recipe_for(tmp_path, method="eagle3", num_speculative_tokens=3)
    work = count(recipe, [Document.answered(TOKENS, 3)])
    assert work.loss_elements == (9, 8, 7)
    assert work.deeper == work.largest_segment == 2 * 12
    assert work.draft_pairs == 3 * sum(range(1, 13)) + 12 * (1 + 2)
