"""The kernels of the gated delta rule against the reference."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from delta_spans import (
    DRAFTS,
    HEADS,
    Span,
    inputs,
    memory,
    moved,
    rows_of,
    weights,
    weights_on,
)

from peagle.ops import delta_net
from peagle.ops.delta_net import DeltaHeads, DeltaState
from peagle.ops.triton import delta_net as kernels

SPANS = [(1, 5, 1 + DRAFTS, 1), (0, 0, 20, 20), (3, 9, 1, 1), (2, 0, 0, 0), (4, 2, 2, 1)]
ACCEPTED = [3, 4, 0, 0, 2]
MANY = [*((row, row % 3, 1 + row % 2, 1) for row in range(33)), (33, 0, 0, 0), (34, 0, 0, 0)]
"""More spans than the fewest that a tile looks through, the last two of which pad."""
Found = tuple[Tensor, DeltaState]


class _Launches:
    """A kernel, and the values of a program that it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.values = kernel, list[int]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **options: Any) -> Any:
            self.values.append(options["VALUES"])
            return self.kernel[grid](*given, **options)

        return launch


def _both(
    device: torch.device, heads: DeltaHeads, spans: list[Span], accepted: list[int]
) -> tuple[Found, Found]:
    """What the kernels and the reference find, each with its memory after it."""
    made = torch.Generator().manual_seed(2)
    layer, rows = memory(len(accepted), heads), rows_of(spans, torch.tensor(accepted))
    for row, start, _, _ in spans:
        if start:  # else a state begins, and what is there is NaN
            layer.state[row] = torch.randn(layer.state[row].shape, generator=made)
            layer.kept[row] = torch.randn(layer.kept[row].shape, generator=made)
    ours, theirs = moved(layer, device), DeltaState(layer.state.clone(), layer.kept.clone())
    product, gates = inputs(sum(span[2] for span in spans), 5, heads)
    given, columns = weights(heads), rows._asdict()
    on_device = {name: c.to(device) for name, c in columns.items() if name != "most"}
    parts = product.to(device), gates.to(device), weights_on(given, device)
    found = kernels.recur(*parts, ours, rows._replace(**on_device))
    return (found, ours), (delta_net.recur(product, gates, given, theirs, rows), theirs)


def _alike(found: Found, expected: Found) -> None:
    (result, ours), (wanted, theirs) = found, expected
    torch.testing.assert_close(result.cpu(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.state.cpu(), theirs.state, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert torch.equal(ours.kept.cpu().nan_to_num(7), theirs.kept.nan_to_num(7))


@pytest.mark.parametrize("heads", [HEADS, DeltaHeads(1, 2, 32, 16)], ids=["three share", "two"])
def test_they_are_the_reference(device: torch.device, heads: DeltaHeads):
    _alike(*_both(device, heads, SPANS, ACCEPTED))


def test_they_are_the_reference_of_many_spans(device: torch.device):
    _alike(*_both(device, DeltaHeads(1, 1, 16, 16), MANY, [row % 4 for row in range(35)]))


def test_bits_do_not_depend_on_how_values_are_shared(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    heads, found, launches = DeltaHeads(1, 2, 128, 64), [], _Launches(kernels._recur)
    monkeypatch.setattr(kernels, "_recur", launches)
    for programs in (1, 10**6):  # as many values a program as there may be, and half of them
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
        ours, theirs = _both(device, heads, SPANS, ACCEPTED)
        _alike(ours, theirs)
        found.append(ours)
    assert launches.values == [32, 16]
    (most, of_most), (half, of_half) = found
    assert torch.equal(most, half)
    assert torch.equal(of_most.state.nan_to_num(7), of_half.state.nan_to_num(7))
