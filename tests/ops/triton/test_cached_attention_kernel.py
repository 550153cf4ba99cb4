from dataclasses import replace

import pytest
import torch
from paged_rows import KV_HEADS, LENGTH, SIZE, close, on, pass_rows, spec_of

from peagle.ops import cached_attention as reference
from peagle.ops.rope import NOPE, RopeConfig, rope_table
from peagle.ops.weight import E4M3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


PARTLY = rope_table(RopeConfig(partial_rotary_factor=0.75), SIZE, LENGTH)
STORED = {
    "normed": spec_of(),
    "values normed, too": spec_of(v_norm=True),
    "values alone normed": spec_of(norm_weight=None, v_norm=True),
    "plain": spec_of(norm_weight=None),
    "a part of each head turned": replace(spec_of(norm_weight=None), rotations=PARTLY),
    "a part of each normed head turned": replace(spec_of(), rotations=PARTLY),
    "not turned": replace(spec_of(norm_weight=None), rotations=rope_table(NOPE, SIZE, LENGTH)),
    "queries that grow": spec_of(norm_weight=None, query_scales=1 + torch.arange(LENGTH) / 100),
}


@pytest.mark.parametrize("name", STORED)
def test_store(device: torch.device, name: str) -> None:
    from peagle.ops.triton import cached_attention as kernel

    spec = STORED[name]
    rows = pass_rows([3, 60], [2, 5], 5)
    qkv, cache = torch.randn(7, 8 * SIZE), torch.randn(2, 2 * LENGTH, KV_HEADS, SIZE)
    ours, theirs = cache.clone().to(device), cache.clone()
    product, positions = qkv.clone().to(device), rows.positions.to(device)
    reference.scale_queries(product, on(device, spec), positions)
    found = kernel.store(product, on(device, spec), ours, positions, rows.writes.to(device))
    expected = reference.store(qkv, spec, theirs, rows.positions, rows.writes)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    close(ours, theirs)
    assert not torch.equal(theirs, cache)


@pytest.mark.parametrize("changes", [{}, {"window": 70}, {"norm_weight": None, "v_norm": True}])
def test_a_cache_in_fp8(device: torch.device, changes: dict) -> None:
    """What is kept equals the reference's to a step of e4m3; what is read of it, to the bit."""
    from peagle.ops.triton import cached_attention as kernel

    spec = spec_of(kv_scales=(0.25, 2.0), **changes)
    rows = pass_rows([3, 160], [2, 5], 5)
    qkv = torch.randn(7, 8 * SIZE)
    ours = torch.zeros(2, 2 * LENGTH, KV_HEADS, SIZE).to(E4M3)
    for start in (0, 100):  # what is behind the rows, too
        older = torch.randn(100, 8 * SIZE)
        places = rows.slots[1, start : start + 100]
        reference.store(older, spec, ours, torch.arange(start, start + 100), places)
    theirs, ours = ours.clone(), ours.to(device)
    placed, located = on(device, spec), rows.positions.to(device)
    found = kernel.store(qkv.clone().to(device), placed, ours, located, rows.writes.to(device))
    expected = reference.store(qkv, spec, theirs, rows.positions, rows.writes)
    close(found[0], expected[0])
    for own, other in zip(found[1:], expected[1:], strict=True):
        assert (own.cpu() != other).float().mean() < 0.01  # a tie in the last bit before rounding
        torch.testing.assert_close(own.cpu(), other, rtol=0.13, atol=0.01)
    assert (ours.cpu().float() != theirs.float()).float().mean() < 0.001
    attended = kernel.attend(found[0], placed, ours, on(device, rows))
    close(attended[:-1], reference.attend(found[0].cpu(), spec, ours.cpu(), rows)[:-1])


@pytest.mark.parametrize("size", [256, 512])
def test_heads_that_are_wide_attend_in_parts_of_a_group(device: torch.device, size: int) -> None:
    from peagle.ops.triton import cached_attention as kernel

    spec, rows = spec_of(16, size, scale=1.0), pass_rows([70], [9], 16)
    query, cache = torch.randn(9, 16, size), torch.randn(2, LENGTH, KV_HEADS, size)
    query /= size**0.5
    expected = reference.attend(query, spec, cache, rows)
    found = kernel.attend(query.to(device), on(device, spec), cache.to(device), on(device, rows))
    close(found[:-1], expected[:-1])  # the last row has no slot


@pytest.mark.sweep
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 70},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"num_heads": 6, "scale": 0.4},
    ],
    ids=["plain", "window", "sinks", "three heads share, scaled"],
)
@pytest.mark.parametrize(
    ("starts", "counts", "most"),
    [
        ([0, 5], [3, 4], 8),
        ([300, 64], [1, 5], 5),
        ([129, 250], [14, 9], 14),
        ([LENGTH - 2], [4], 4),
    ],
)
def test_attend(
    device: torch.device, changes: dict, starts: list[int], counts: list[int], most: int
) -> None:
    from peagle.ops.triton import cached_attention as kernel

    spec = spec_of(**changes)
    inside = [min(n, LENGTH - s) for s, n in zip(starts, counts, strict=True)]
    rows = pass_rows(starts, inside, most)
    query = torch.randn(sum(inside), 10, SIZE)[:, : spec.num_heads]
    cache = torch.randn(2, len(starts) * LENGTH, KV_HEADS, SIZE)
    expected = reference.attend(query, spec, cache, rows)
    for _ in range(2):  # a second launch finds the arrival counters as the first one did
        found = kernel.attend(
            query.to(device), on(device, spec), cache.to(device), on(device, rows)
        )
        close(found[:-1], expected[:-1])  # the last row has no slot
