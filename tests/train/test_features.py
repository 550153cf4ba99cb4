import pytest
import tiny
import torch

from peagle.train.features import target_features
from peagle.train.packing import Document, pack

TOKENS = [(3 * i + i * i) % tiny.MASK for i in range(24)]


@pytest.mark.parametrize("family", tiny.KINDS)
def test_features_of_packed_documents_are_those_of_each(targets, family: str):
    target = targets[family]
    first, second = Document.answered(TOKENS[:9], 2), Document.answered(TOKENS[9:], 3)
    batch = pack([first, second], 26).batch(torch.arange(1))
    features = target_features(target.decoder, batch, tiny.TAPS)
    for start, document in ((0, first), (9, second)):
        logits, tapped = tiny.run_target(target.decoder, document.tokens)
        own = slice(start, start + len(document.tokens))
        torch.testing.assert_close(features.tapped[own], tapped, atol=1e-5, rtol=1e-5)
        ours = target.decoder.logits(features.final[own])
        torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma4"])
def test_one_document_and_padding_need_no_mask(targets, family: str):
    """Only the first document is in the loss, so causal attention is enough."""
    target = targets[family]
    document = Document.answered(TOKENS, 2)
    batch = pack([document], 30).batch(torch.arange(1))
    assert batch.one_document
    features = target_features(target.decoder, batch, tiny.TAPS)
    _, tapped = tiny.run_target(target.decoder, document.tokens)
    torch.testing.assert_close(features.tapped[:24], tapped, atol=1e-5, rtol=1e-5)
