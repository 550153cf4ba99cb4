"""Which kernel a layer's parts are given to, where one is chosen by sizes."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from peagle.ops import residual
from peagle.ops.linear import Linear
from peagle.ops.products import cublas, few_rows, wide_gate
from peagle.ops.products.normed import Normed


@pytest.mark.parametrize("on_hopper", [False, True])
def test_wide_gates_are_told_how_many_rows_are_live(
    monkeypatch: pytest.MonkeyPatch, on_hopper: bool
) -> None:
    asked: list[Tensor | None] = []

    def gated(x: Tensor, weight: Tensor, live: Tensor | None) -> Tensor:
        asked.append(live)
        return x

    modules = {
        "tiles": SimpleNamespace(takes=lambda *_, **__: False),
        "wide_gate": SimpleNamespace(takes=lambda *_: True, gated=gated),
        "swiglu": SimpleNamespace(swiglu=lambda gate_up: gate_up[:, :4]),
    }
    for module in (few_rows, wide_gate, cublas):
        monkeypatch.setattr(module, "kernels", modules.__getitem__)
    for module in (few_rows, cublas):
        monkeypatch.setattr(module, "has_kernels", lambda x: True)
    monkeypatch.setattr(wide_gate, "on_hopper", lambda x: on_hopper)
    layer, live = Linear(4, 8), torch.tensor([3], dtype=torch.int32)
    torch.nn.init.ones_(layer.weight)
    x = torch.ones(5, 4)
    found = residual.gated(Normed(x, None, 1e-6), layer, live)
    assert (found is x) == on_hopper
    assert asked == [live] * on_hopper
    residual.gated(Normed(x, torch.ones(1, 5), 1e-6), layer, live)
    assert len(asked) == on_hopper  # not where the norm is still to be divided by


def test_a_product_with_a_bias_is_rounded_once() -> None:
    torch.manual_seed(0)
    layer = Linear(64, 96, bias=True).bfloat16().requires_grad_(False)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias, std=8)
    x = torch.randn(40, 64).bfloat16()
    found = residual.linear(Normed(x, None, 1e-6), layer)
    exact = (x.double() @ layer.weight.double().T + layer.bias.double()).bfloat16()
    assert (found == exact).double().mean() > 0.99
