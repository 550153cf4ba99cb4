import pytest
import torch
from torch import Tensor

from peagle.ops import cached_attention as reference
from peagle.ops.cached_attention import Heads, PassRows
from peagle.ops.rope import RopeConfig, rope_table

LENGTH, HEADS, KV_HEADS, SIZE = 400, 4, 2, 16


def heads_of(query: int = HEADS, **changes: object) -> Heads:
    values = {"norm_weight": torch.rand(2 * SIZE) + 0.5, "window": None, "sinks": None, **changes}
    table = rope_table(RopeConfig(), SIZE, LENGTH)
    return Heads(query, KV_HEADS, SIZE, rotations=table, eps=1e-6, **values)


def pass_rows(starts: list[int], counts: list[int], most: int) -> PassRows:
    """Requests with disjoint slots in no order; the last request's last row has none."""
    order = torch.randperm(len(starts) * LENGTH).view(len(starts), LENGTH)
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    spans = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
    writes = torch.cat([order[i, span] for i, span in enumerate(spans)])
    writes[-1] = -1
    limits = torch.full((len(starts),), LENGTH)
    limits[-1] = starts[-1] + counts[-1] - 1
    columns = (list(range(len(starts))), starts, firsts, counts)
    return PassRows(order, limits, *map(torch.tensor, columns), torch.cat(spans), writes, most)


def on(device: torch.device, value):  # type: ignore[no-untyped-def]
    moved = {k: v.to(device) if torch.is_tensor(v) else v for k, v in vars(value).items()}
    return type(value)(**moved)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("norm", [True, False])
def test_store(device: torch.device, norm: bool) -> None:
    from peagle.ops.triton import cached_attention as kernel

    heads = heads_of() if norm else heads_of(norm_weight=None)
    rows = pass_rows([3, 60], [2, 5], 5)
    qkv, cache = torch.randn(7, 8 * SIZE), torch.randn(2, 2 * LENGTH, KV_HEADS, SIZE)
    ours, theirs = cache.clone().to(device), cache.clone()
    found = kernel.store(
        qkv.clone().to(device),
        on(device, heads),
        ours,
        rows.positions.to(device),
        rows.writes.to(device),
    )
    expected = reference.store(qkv, heads, theirs, rows.positions, rows.writes)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    close(ours, theirs)
    assert not torch.equal(theirs, cache)


@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 70}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"query": 6}],
    ids=["plain", "window", "sinks", "three heads share"],
)
@pytest.mark.parametrize(
    ("starts", "counts", "most"),
    [([0, 5], [3, 4], 8), ([300, 64], [1, 5], 5), ([129, 250], [14, 9], 14), ([398], [4], 4)],
)
def test_attend(
    device: torch.device, changes: dict, starts: list[int], counts: list[int], most: int
) -> None:
    from peagle.ops.triton import cached_attention as kernel

    heads = heads_of(**changes)
    inside = [min(n, LENGTH - s) for s, n in zip(starts, counts, strict=True)]
    rows = pass_rows(starts, inside, most)
    query = torch.randn(sum(inside), 10, SIZE)[:, : heads.query]
    cache = torch.randn(2, len(starts) * LENGTH, KV_HEADS, SIZE)
    expected = reference.attend(query, heads, cache, rows)
    for _ in range(2):  # a second launch finds the arrival counters as the first one did
        found = kernel.attend(
            query.to(device), on(device, heads), cache.to(device), on(device, rows)
        )
        close(found[:-1], expected[:-1])  # the last row has no slot
