"""On a Hopper GPU, or emulated."""

from dataclasses import replace

import pytest
import torch
from paged_rows import KV_HEADS, LENGTH, on, pass_rows, spec_of

from peagle.ops import cached_attention as reference
from peagle.ops.weight import E4M3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 2, "scale": 0.15},
        {"num_heads": 6},
        {"head_dim": 64, "norm_weight": None},
        {"head_dim": 64, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.2, 0.1, -3.0])},
        {"num_heads": 96},
        {"window": 70},
        {"head_dim": 256, "num_heads": 4, "v_norm": True},
        {"head_dim": 256, "num_heads": 2, "window": 70},
    ],
    ids=[
        "plain",
        "alone, scaled",
        "three heads share",
        "no norm",
        "sinks",
        "48 heads share",
        "window",
        "wide, values normed",
        "wide, window",
    ],
)
@pytest.mark.parametrize(
    ("starts", "counts"),
    [
        ([0, 5], [3, 4]),
        ([300, 64], [1, 5]),
        ([129, 250], [14, 9]),
        ([1090], [4]),
        ([500, 7], [16, 3]),
        ([700], [16]),
        ([20, 3, 64, 65, 127, 300, 1] * 3, [16] * 21),
        ([70, 3, 0, 200, 64, 63, 128, 127, 5], [1] * 9),
        ([64, 650, 127, 200, 1] * 10, [2] * 50),
        ([20, 3, 64, 65, 127, 900, 1] * 2, [8] * 14),
        ([1000, 3, 64, 65, 20, 31, 1] * 2, [2] * 14),
        ([20, 3, 64, 65, 127, 900, 1] * 20, [8] * 140),
        ([20, 3, 64, 31, 127, 900, 33] * 20, [3] * 140),
    ],
    ids=[
        "no older keys",
        "one tile",
        "two requests",
        "many parts",
        "as many rows as there may be",
        "as many alone",
        "as many of many requests",
        "a row each",
        "few parts",
        "one part emulated",
        "a long one among many",
        "one part",
        "one part of few rows",
    ],
)
def test_is_store_then_attend(
    hopper: torch.device, changes: dict, starts: list[int], counts: list[int]
) -> None:
    from peagle.ops.triton import hopper_attention as kernel

    if hopper.type != "cuda" and len(starts) > 50:
        pytest.skip("takes long emulated, where fewer multiprocessors make parts fewer, too")
    spec = spec_of(**{"num_heads": 8, "head_dim": 128, **changes})
    if spec.num_heads == 96 and max(counts) > 1:
        pytest.skip("more lines than the kernel takes")
    rows = pass_rows(starts, counts, max(counts))
    device, half = hopper, torch.bfloat16
    qkv = torch.randn(sum(counts), (spec.num_heads + 2 * KV_HEADS) * spec.head_dim).to(half)
    cache = torch.randn(2, len(starts) * LENGTH, KV_HEADS, spec.head_dim).to(half)
    theirs = cache.float()
    expected = reference.attend_product(qkv.float(), spec, theirs, rows)
    placed, spec = on(device, rows), on(device, spec)
    divided = replace(placed, shares=kernel.shares_of(placed, spec, cache.to(device)))
    for told in (placed, divided):  # also, the second finds the arrival counters as the first did
        ours = cache.clone().to(device)
        found = kernel.attend_product(qkv.to(device), spec, ours, told, told is divided)
        near(found[:-1], expected[:-1])  # the last row has no slot
        near(ours, theirs)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 70},
        {"num_heads": 2, "head_dim": 64, "norm_weight": None},
        {"num_heads": 6, "head_dim": 64, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.2])},
        {"num_heads": 4, "head_dim": 256},
    ],
    ids=["plain", "window", "alone, no norm", "three heads share, sinks", "wide"],
)
@pytest.mark.parametrize("starts", [[0, 5], [300, 64], [700], [129, 1, 250]])
@pytest.mark.parametrize("count", [5, 16])
def test_rows_of_a_tree_see_their_ancestors(
    hopper: torch.device, changes: dict, starts: list[int], count: int
) -> None:
    """At the positions of their depths, and each writes where its place says."""
    from peagle.ops.triton import hopper_attention as kernel

    spec = spec_of(**{"num_heads": 8, "head_dim": 128, **changes})
    rows, words = pass_rows(starts, [count] * len(starts), count), []
    for request in range(len(starts)):
        words.append([1])
        for row in range(1, count):
            words[request].append(words[request][(row * 7 + request) % row] | 1 << row)
    depths = torch.tensor([[word.bit_count() - 1 for word in of] for of in words])
    positions = (torch.tensor(starts)[:, None] + depths).flatten()
    ancestors = torch.tensor(words, dtype=torch.int32).flatten()
    rows = replace(rows, positions=positions, ancestors=ancestors)
    device, half = hopper, torch.bfloat16
    qkv = torch.randn(len(positions), (spec.num_heads + 2 * KV_HEADS) * spec.head_dim).to(half)
    cache = torch.randn(2, len(starts) * LENGTH, KV_HEADS, spec.head_dim).to(half)
    theirs, ours = cache.float(), cache.clone().to(device)
    expected = reference.attend_product(qkv.float(), spec, theirs, rows)
    spec, rows = on(device, spec), on(device, rows)
    assert kernel.takes(spec, ours, rows)
    found = kernel.attend_product(qkv.to(device), spec, ours, rows)
    near(found[:-1], expected[:-1])  # the last row has no slot
    near(ours, theirs)


@pytest.mark.sweep
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "block"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 0.3)], ids=["units of 1", "other units"])
@pytest.mark.parametrize(
    ("starts", "counts"),
    [([0, 5], [3, 4]), ([300, 64], [1, 5]), ([1090], [4]), ([1, 127] * 8, [8] * 16)],
)
def test_a_cache_of_8_bits(
    hopper: torch.device,
    head_dim: int,
    causal: bool,
    scales: tuple[float, float],
    starts: list[int],
    counts: list[int],
) -> None:
    """What rows see of themselves is rounded as what the cache keeps is."""
    from peagle.ops.triton import hopper_attention as kernel

    spec = replace(spec_of(8, head_dim), causal=causal, kv_scales=scales)
    rows, half = pass_rows(starts, counts, max(counts)), torch.bfloat16
    qkv = torch.randn(sum(counts), (8 + 2 * KV_HEADS) * head_dim).to(half)
    cache = torch.randn(2, len(starts) * LENGTH, KV_HEADS, head_dim).to(E4M3)
    theirs, ours = cache.clone(), cache.clone().to(hopper)
    expected = reference.attend_product(qkv, spec, theirs, rows)
    spec, rows = on(hopper, spec), on(hopper, rows)
    assert kernel.takes(spec, ours, rows)
    found = kernel.attend_product(qkv.to(hopper), spec, ours, rows)
    # the last row has no slot; a number near the middle of two of E4M3 may become either
    off = (found[:-1].cpu().float() - expected[:-1].float()).norm()
    assert off < 0.03 * expected[:-1].float().norm()
    torch.testing.assert_close(found[:-1].cpu(), expected[:-1], rtol=0.1, atol=0.1)
    torch.testing.assert_close(ours.cpu().float(), theirs.float(), rtol=0.13, atol=0.05)


def test_a_row_of_the_table_that_belongs_to_no_request_changes_nothing(
    hopper: torch.device,
) -> None:
    from peagle.ops.triton import hopper_attention as kernel

    spec, rows = spec_of(8, 128), pass_rows([100, 1, 200], [3, 3, 3], 3)
    rows.limits[1], rows.limits[2] = 0, LENGTH
    rows.writes[3:6], rows.writes[-1] = -1, rows.slots[2, 202]
    device, half = hopper, torch.bfloat16
    qkv = torch.randn(9, (8 + 2 * KV_HEADS) * 128).to(half)
    cache = torch.randn(2, 3 * LENGTH, KV_HEADS, 128).to(half)
    theirs, ours = cache.float(), cache.clone().to(device)
    expected = reference.attend_product(qkv.float(), spec, theirs, rows)
    found = kernel.attend_product(qkv.to(device), on(device, spec), ours, on(device, rows))
    near(ours, theirs)
    for kept in (slice(0, 3), slice(6, 9)):
        near(found[kept], expected[kept])
    assert not found[3:6].isnan().any()


def test_rows_without_a_slot_see_what_is_before_it(hopper: torch.device) -> None:
    from peagle.ops.triton import hopper_attention as kernel

    spec, rows = spec_of(8, 64), pass_rows([100, 300], [8, 8], 8)
    rows.limits[:] = torch.tensor([104, 306])
    rows.writes[[*range(4, 8), 14, 15]] = -1
    device, half = hopper, torch.float16
    qkv = torch.randn(16, (8 + 2 * KV_HEADS) * 64).to(half)
    cache = torch.randn(2, 2 * LENGTH, KV_HEADS, 64).to(half)
    theirs, ours = cache.float(), cache.clone().to(device)
    expected = reference.attend_product(qkv.float(), spec, theirs, rows)
    spec, rows = on(device, spec), on(device, rows)
    rows = replace(rows, shares=kernel.shares_of(rows, spec, ours))
    found = kernel.attend_product(qkv.to(device), spec, ours, rows, True)
    near(ours, theirs)
    for kept in (slice(0, 4), slice(8, 14)):
        near(found[kept], expected[kept])


def near(one: torch.Tensor, exact: torch.Tensor) -> None:
    """`exact` is computed in float32, so that the rounding of one side alone counts. Both are
    compared as a whole, too, since what long contexts give is small."""
    one, exact = one.cpu().float(), exact.cpu()
    torch.testing.assert_close(one, exact, rtol=2e-2, atol=2e-2)
    assert (one - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("group", [4, 8])
def test_a_row_gets_the_same_alone_and_behind_others(hopper: torch.device, group: int) -> None:
    """So that greedy text is the same with drafts to verify and without, but for sums' order."""
    from peagle.ops.triton import hopper_attention as kernel

    spec = spec_of(group * KV_HEADS, 128)
    together, alone = (pass_rows([800 + i] * 9, [n] * 9, n) for i, n in ((0, 8), (7, 1)))
    alone = replace(alone, slots=together.slots)
    device, half = hopper, torch.bfloat16
    qkv = torch.randn(9 * 8, (spec.num_heads + 2 * KV_HEADS) * 128).to(half).to(device)
    cache = torch.randn(2, 9 * LENGTH, KV_HEADS, 128).to(half).to(device)
    verified = kernel.attend_product(qkv, on(device, spec), cache, on(device, together))
    last = qkv.view(9, 8, -1)[:, -1].contiguous()
    decoded = kernel.attend_product(last, on(device, spec), cache, on(device, alone))
    alike = (verified.view(9, 8, -1)[:, -1] == decoded)[:-1]  # the last row has no slot
    assert alike.float().mean() > 0.998
