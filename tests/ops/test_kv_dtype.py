"""Keys and values in FP8: what is kept of them, and what every reader sees."""

from dataclasses import replace

import pytest
import torch

from peagle.ops.cached_attention import AttentionHeads, PassRows, attend, write
from peagle.ops.kv_dtype import gathered, stored, widened
from peagle.ops.weight import E4M3


def test_numbers_of_e4m3_are_kept_as_they_are() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = codes[~codes.isnan()]
    assert torch.equal(widened(stored(numbers, E4M3, 1.0), torch.float32, 1.0), numbers)


def test_what_is_too_large_becomes_the_largest() -> None:
    kept = stored(torch.tensor([1e4, -1e4, 470.0]), E4M3, 1.0)
    assert kept.float().tolist() == [448.0, -448.0, 448.0]


def test_units_reach_what_e4m3_does_not() -> None:
    kept = stored(torch.tensor([1e4]), E4M3, 100.0)
    assert widened(kept, torch.float32, 100.0).item() == pytest.approx(1e4, rel=1 / 16)


def test_readers_see_what_was_written() -> None:
    torch.manual_seed(0)
    heads = AttentionHeads(4, 2, 16, kv_scales=(0.5, 2.0))
    cache, writes = torch.zeros(2, 8, 2, 16).to(E4M3), torch.tensor([6, 2, -1])
    sides = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    read = write(cache, writes, sides, heads)
    found = gathered(cache, torch.tensor([6, 2]), read[0].dtype, heads.kv_scales)
    for own, again, exact in zip(read, found, sides, strict=True):
        assert torch.equal(again, own[:2])
        assert not torch.equal(own, exact)
        torch.testing.assert_close(own, exact, rtol=0.07, atol=0.01)


def test_rows_attend_to_rounded_keys_their_own_included() -> None:
    torch.manual_seed(0)
    heads = AttentionHeads(4, 2, 16, kv_scales=(0.5, 2.0))
    sides = torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    slots, every = torch.arange(6)[None], torch.arange(6)
    narrow, wide = torch.zeros(2, 6, 2, 16).to(E4M3), torch.zeros(2, 6, 2, 16)
    rounded = write(narrow, every, sides, heads)
    write(wide, every, rounded, replace(heads, kv_scales=(1.0, 1.0)))
    one = torch.tensor([0])
    rows = PassRows(slots, one + 6, one, one + 4, one, one + 2, every[4:], every[4:], 2)
    query = torch.randn(2, 4, 16)
    assert torch.equal(attend(query, heads, narrow, rows), attend(query, heads, wide, rows))
