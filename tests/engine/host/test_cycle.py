import torch

from peagle.engine.host.cycle import accept


def test_a_request_accepts_none_of_the_drafts_that_it_did_not_have():
    """Nor where its logits are NaN: its token is -1 then, which is no padding."""
    drafts, chosen = torch.tensor([5, 6, 7]), torch.tensor([5, 6, 2, 9, -1])
    assert accept(drafts, chosen, [3, 0]) == ([[5, 6, 2], [-1]], [2, 0])
    assert accept(drafts[:0], chosen[3:], [0, 0]) == ([[9], [-1]], [0, 0])
