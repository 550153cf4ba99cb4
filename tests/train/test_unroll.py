"""EAGLE-3's training pass sees what inference sees: the same logits, slot for slot."""

import pytest
import tiny
import torch
from test_partition import VARIANTS, Streams, check_documents_are_apart, streams

from peagle.drafters.model import DraftModel
from peagle.train.features import target_features
from peagle.train.packing import Batch, Document, pack
from peagle.train.unroll import SequentialPass

K = 4
TOKENS = [(3 * i + i * i) % tiny.MASK for i in range(9)]


def streams_of(model: DraftModel, target, batch: Batch) -> Streams:
    features = target_features(target.decoder, batch, model.config.taps)
    return streams(SequentialPass(model, batch, features, K).passes())


@pytest.mark.sweep
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("known", [2, 3, 9])
def test_eagle3_is_trained_as_it_is_run(target, drafter_of, changes, known: int):
    """Where the true tokens are those that it drafts: training feeds true tokens."""
    drafter = drafter_of(False, **changes)
    proposal = tiny.propose(drafter, target.decoder, TOKENS[:known], K)
    document = Document.answered((*TOKENS[:known], *proposal.drafts, 1), 1)
    found = streams_of(drafter.model, target, pack([document], 24).batch(torch.arange(1)))
    for depth in range(K):
        logits = drafter.model.readout.logits(found[known - 2, depth][None])[0]
        torch.testing.assert_close(logits, proposal.logits[depth], atol=1e-4, rtol=1e-4)


def test_packed_documents_do_not_see_each_other(target, drafter_of):
    model = drafter_of(False).model
    check_documents_are_apart(lambda batch: streams_of(model, target, batch))
