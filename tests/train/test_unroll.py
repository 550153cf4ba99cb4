"""The training pass sees what inference sees: the same logits, slot for slot."""

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from peagle.drafters.drafter import Drafter
from peagle.train.cod import depth_shares
from peagle.train.conversations import Document, PackedRows, pack
from peagle.train.features import target_features
from peagle.train.unroll import Pass, parallel_pass, sequential_passes

K, LENGTH = 4, 24
TOKENS = [(3 * i + i * i) % tiny.MASK for i in range(LENGTH)]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"qk_norm": False, "layers": 1},
    {"norm_output": True},
    {"fc_norm": True, "norm_before_residual": True},
]


@torch.no_grad()
def passes(drafter: Drafter, target: Any, rows: PackedRows, ratio: float = 1.0) -> list[Pass]:
    """At training."""
    model = drafter.model
    features = target_features(target.decoder, rows, model.config.taps)
    if not model.config.parallel:
        return list(sequential_passes(model, rows, features, K))
    generator = torch.Generator().manual_seed(0)
    return list(parallel_pass(model, rows, features, depth_shares(K, ratio, 0.0), generator))


def hidden_of(trained: list[Pass], row: int = 0) -> dict[tuple[int, int], Tensor]:
    """The residual stream of every charged (anchor, depth) of a row."""
    return {
        (int(part.elements.anchors[row, i]), int(part.elements.depths[row, i])): part.hidden[row, i]
        for part in trained
        for i in part.elements.charged[row].nonzero().flatten().tolist()
    }


@pytest.mark.parametrize("ratio", [1.0, 0.6])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_p_eagle_is_trained_as_it_is_run(target, drafter_of, changes, ratio: float):
    """Chain (a, 0 ... K-1) stands for the drafts after x_0 ... x_{a+1}."""
    drafter = drafter_of(True, **changes)
    rows = pack([Document.answered(tuple(TOKENS), 1)], LENGTH + 3)
    streams = hidden_of(passes(drafter, target, rows, ratio))
    assert len(streams) > 1.5 * LENGTH
    for anchor in range(LENGTH - 2):
        proposal = tiny.propose(drafter, target.decoder, TOKENS[: anchor + 2], K)
        for depth in range(K):
            if (anchor, depth) in streams:
                logits = drafter.model.logits(streams[anchor, depth][None])[0]
                torch.testing.assert_close(logits, proposal.logits[depth], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("known", [2, 3, 9])
def test_eagle3_is_trained_as_it_is_run(target, drafter_of, changes, known: int):
    """Where the true tokens are those that it drafts: training feeds true tokens."""
    drafter = drafter_of(False, **changes)
    proposal = tiny.propose(drafter, target.decoder, TOKENS[:known], K)
    document = Document.answered((*TOKENS[:known], *proposal.drafts, 1), 1)
    streams = hidden_of(passes(drafter, target, pack([document], LENGTH)))
    for depth in range(K):
        logits = drafter.model.logits(streams[known - 2, depth][None])[0]
        torch.testing.assert_close(logits, proposal.logits[depth], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("parallel", [True, False])
def test_packed_documents_do_not_see_each_other(target, drafter_of, parallel: bool):
    drafter = drafter_of(parallel)
    first, second = Document.answered(tuple(TOKENS[:9]), 2), Document.answered(tuple(TOKENS[9:]), 3)
    both = hidden_of(passes(drafter, target, pack([first, second], LENGTH + 2)))
    for start, document in ((0, first), (9, second)):
        alone = hidden_of(passes(drafter, target, pack([document], LENGTH)))
        for (anchor, depth), hidden in alone.items():
            packed = both.pop((anchor + start, depth))
            torch.testing.assert_close(packed, hidden, atol=1e-4, rtol=1e-4)
    assert not both


def test_target_features_of_packed_rows_are_those_of_each_document(target):
    first, second = Document.answered(tuple(TOKENS[:9]), 2), Document.answered(tuple(TOKENS[9:]), 3)
    features = target_features(target.decoder, pack([first, second], LENGTH + 2), tiny.TAPS)
    for start, document in ((0, first), (9, second)):
        logits, tapped = tiny.run_target(target.decoder, document.tokens)
        own = slice(start, start + len(document.tokens))
        torch.testing.assert_close(features.tapped[0, own], tapped, atol=1e-5, rtol=1e-5)
        ours = target.decoder.head(features.final[0, own])
        torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)
