"""The kernels of the gated delta rule against the reference."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from delta_spans import DRAFTS, HEADS, inputs, memory, moved, rows_of, weights, weights_on

from peagle.ops import delta_net
from peagle.ops.delta_net import DeltaHeads, DeltaState
from peagle.ops.triton import delta_net as kernels

SPANS = [(1, 5, 1 + DRAFTS, 1), (0, 0, 20, 20), (3, 9, 1, 1), (2, 0, 0, 0), (4, 2, 2, 1)]


@pytest.mark.parametrize("heads", [HEADS, DeltaHeads(1, 2, 32, 16)], ids=["three share", "two"])
def test_they_are_the_reference(device: torch.device, heads: DeltaHeads):
    made = torch.Generator().manual_seed(2)
    layer, accepted = memory(5, heads), torch.tensor([3, 4, 0, 0, 2])
    for row in (1, 3, 4):
        layer.state[row] = torch.randn(layer.state[row].shape, generator=made)
        layer.kept[row] = torch.randn(layer.kept[row].shape, generator=made)
    expected_layer = DeltaState(layer.state.clone(), layer.kept.clone())
    product, gates = inputs(sum(span[2] for span in SPANS), 5, heads)
    given, rows = weights(heads), rows_of(SPANS, accepted)
    expected = delta_net.recur(product, gates, given, expected_layer, rows)
    on_device = moved(layer, device)
    rows = rows_of(SPANS, accepted)
    rows = rows._replace(
        **{name: column.to(device) for name, column in rows._asdict().items() if name != "most"}
    )
    parts = product.to(device), gates.to(device), weights_on(given, device)
    found = kernels.recur(*parts, on_device, rows)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        on_device.state.cpu(), expected_layer.state, rtol=1e-4, atol=1e-5, equal_nan=True
    )
    assert torch.equal(on_device.kept.cpu().nan_to_num(7), expected_layer.kept.nan_to_num(7))
