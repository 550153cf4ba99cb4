import pytest
import torch
from paged_rows import KV_HEADS, LENGTH, SIZE, close, on, pass_rows, spec_of

from peagle.ops import cached_attention as reference


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


HEADS = {
    "plain": {},
    "no norm": {"norm_weight": None},
    "window": {"window": 70},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "three heads share, scaled": {"num_heads": 6, "scale": 0.4},
    "values normed": {"v_norm": True},
}
BATCHES = {
    "no older keys": ([0, 5], [3, 4]),
    "one tile": ([300, 64], [1, 5]),
    "two requests": ([129, 250], [14, 9]),
    "several tiles a part": ([1000], [4]),
    "fewer warps": ([64, 65, 127, 200, 1] * 10, [2] * 50),
    "too many requests": ([20, 3, 64, 65, 127, 200, 1] * 12, [2] * 84),
    "too many rows": ([70, 5], [40, 3]),
}
MANY = {"fewer warps", "too many requests"}
"""Batches over which the interpreter goes for long; what they change does not depend on heads."""
ALL_HEADS = BATCHES if torch.cuda.is_available() else {"one tile", "several tiles a part"}
"""Batches that meet every kind of heads."""
CASES = [
    pytest.param(HEADS[heads], settled, *BATCHES[batch], id=f"{batch}, {heads}, {settled}")
    for batch in BATCHES
    for heads in (HEADS if batch in ALL_HEADS and batch not in MANY else ("window",))
    for settled in ((False, True) if batch not in MANY else (False,))
]


@pytest.mark.parametrize(("changes", "settled", "starts", "counts"), CASES)
def test_is_store_then_attend(
    device: torch.device, changes: dict, settled: bool, starts: list[int], counts: list[int]
) -> None:
    from peagle.ops.triton import product_attention as kernel

    spec, rows = spec_of(**changes), pass_rows(starts, counts, max(counts))
    qkv = torch.randn(sum(counts), (spec.num_heads + 2 * KV_HEADS) * SIZE)
    cache = torch.randn(2, len(starts) * LENGTH, KV_HEADS, SIZE)
    theirs = cache.clone()
    expected = reference.attend_product(qkv, spec, theirs, rows)
    # a second launch finds the arrival counters as the first one did
    for _ in range(1 if settled else 2):
        ours = cache.clone().to(device)
        placed = on(device, rows)
        found = kernel.attend_product(
            qkv.clone().to(device), on(device, spec), ours, placed, settled
        )
        close(found[:-1], expected[:-1])  # the last row has no slot
        close(ours, theirs)


def test_a_row_of_the_table_that_belongs_to_no_request_changes_nothing(
    device: torch.device,
) -> None:
    from peagle.ops.triton import product_attention as kernel

    spec, rows = spec_of(), pass_rows([100, 1, 200], [3, 3, 3], 3)
    rows.limits[1], rows.limits[2] = 0, LENGTH
    rows.writes[3:6], rows.writes[-1] = -1, rows.slots[2, 202]
    qkv = torch.randn(9, (spec.num_heads + 2 * KV_HEADS) * SIZE)
    cache = torch.randn(2, 3 * LENGTH, KV_HEADS, SIZE)
    theirs, ours = cache.clone(), cache.clone().to(device)
    expected = reference.attend_product(qkv, spec, theirs, rows)
    found = kernel.attend_product(qkv.to(device), on(device, spec), ours, on(device, rows))
    close(ours, theirs)
    for kept in (slice(0, 3), slice(6, 9)):
        close(found[kept], expected[kept])
    assert not found[3:6].isnan().any()
