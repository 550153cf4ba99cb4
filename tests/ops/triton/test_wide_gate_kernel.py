"""On a Hopper GPU, or emulated."""

import pytest
import torch
from torch.nn import functional as F

from peagle.ops.swiglu import swiglu

half = torch.bfloat16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def draw(rows: int, depth: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, depth).to(half), torch.randn(2 * outputs, depth).to(half)


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return swiglu(F.linear(x.float(), weight.float()))


@pytest.mark.parametrize(
    ("rows", "depth", "outputs"),
    [(65, 64, 128), (128, 320, 384), (300, 128, 256), (520, 192, 2176)],
    ids=["one step", "a tile", "rows are left", "several turns"],
)
def test_is_the_gated_product(hopper: torch.device, rows: int, depth: int, outputs: int) -> None:
    from peagle.ops.triton import wide_gate as kernel

    x, weight = draw(rows, depth, outputs)
    near(kernel.gated(x.to(hopper), weight.to(hopper)), expected(x, weight))


def test_products_are_rounded_before_the_gate_is_taken(hopper: torch.device) -> None:
    """As where they are written first, so that a row is the same on either way."""
    from peagle.ops.triton import wide_gate as kernel

    x, weight = (torch.randint(-8, 9, size).to(half) / 64 for size in ((129, 64), (256, 64)))
    found = kernel.gated(x.to(hopper), weight.to(hopper)).float().cpu()
    product = F.linear(x.float(), weight.float())
    assert (found == swiglu(product.to(half).float()).to(half)).float().mean() > 0.99
    assert (found == swiglu(product).to(half)).float().mean() < 0.9


@pytest.mark.parametrize("live", [0, 1, 128, 129, 300, 500])
def test_tiles_behind_the_last_live_row_are_left_out(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, live: int
) -> None:
    from peagle.ops.triton import wide_gate as kernel

    x, weight = draw(300, 128, 256)
    count = torch.tensor([live], dtype=torch.int32, device=hopper)
    there = x.to(hopper), weight.to(hopper)
    marked = torch.full((300, 256), torch.inf, dtype=half, device=hopper)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_, **__: marked)
    found = kernel.gated(*there, count)
    near(found[:live], expected(x[:live], weight))
    assert found[-(-live // 128) * 128 :].isinf().all()


def test_takes_what_keeps_an_h200_busy() -> None:
    from peagle.ops.triton import wide_gate as kernel

    qwen3_8b, live = torch.empty(24_576, 64, dtype=half), torch.ones(1, dtype=torch.int32)
    for rows in (512, 1024, 8192):
        assert kernel.takes(torch.empty(rows, 64, dtype=half), qwen3_8b), rows
    for rows in (128, 256, 384, 640, 896):
        assert not kernel.takes(torch.empty(rows, 64, dtype=half), qwen3_8b), rows
    for rows in (512, 640, 896):
        assert kernel.takes(torch.empty(rows, 64, dtype=half), qwen3_8b, live), rows
    for rows in (256, 384):
        assert not kernel.takes(torch.empty(rows, 64, dtype=half), qwen3_8b, live), rows


def test_takes_hundreds_of_rows_of_whole_steps_and_tiles_in_bfloat16() -> None:
    from peagle.ops.triton import wide_gate as kernel

    rows = 66 * 128
    assert kernel.takes(*draw(rows, 64, 256))
    assert not kernel.takes(*draw(128, 64, 132 * 128))
    assert not kernel.takes(*draw(rows, 96, 256))
    assert not kernel.takes(*draw(rows, 64, 192))
    assert not kernel.takes(*(x.float() for x in draw(rows, 64, 256)))
    assert not kernel.takes(*draw(0, 64, 256))
    x, weight = draw(rows, 128, 256)
    assert not kernel.takes(x[:, :64], weight[:, :64])


def near(one: torch.Tensor, other: torch.Tensor) -> None:
    scale = float(other.abs().max()) if other.numel() else 1.0
    torch.testing.assert_close(one.float().cpu(), other, rtol=2e-2, atol=2e-3 * scale)
