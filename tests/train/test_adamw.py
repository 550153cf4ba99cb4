import pytest
import torch
from torch import nn

from peagle.train.adamw import BETAS, AdamW

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_torchs_with_scaled_gradients(device: str, decay: float):
    """Several shapes, since a GPU's kernel is compiled; copies hold the rounded weights."""
    torch.manual_seed(0)
    shapes = [(256, 384), (128, 128), (256,), (7, 3), ()]
    ours = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    copies = {p: p.detach().bfloat16() for p in ours[::2]}
    subject = AdamW(ours, copies, decay)
    reference = torch.optim.AdamW(theirs, lr=0.0, betas=BETAS, weight_decay=decay)
    for step in range(5):
        for group in (*subject.param_groups, *reference.param_groups):
            group["lr"] = 0.01 / (step + 1)
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine) * 10.0**step
            its.grad = mine.grad * 0.25
        subject.step(torch.tensor(0.25, device=device))
        reference.step()
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its)
        assert subject.state[mine].keys() == reference.state[its].keys()
        for name, kept in subject.state[mine].items():
            its_own = reference.state[its][name]
            # gradients of 10^4, some of which nearly cancel: a fused kernel rounds differently
            torch.testing.assert_close(kept, its_own, rtol=1e-4, atol=1e-4, check_device=False)
    for master, copy in copies.items():
        assert torch.equal(copy, master.bfloat16())
