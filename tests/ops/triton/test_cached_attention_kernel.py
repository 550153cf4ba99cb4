import pytest
import torch

from peagle.ops import cached_attention as reference
from peagle.ops.cached_attention import Heads, PassRows
from peagle.ops.rope import RopeConfig, rope_table


def heads_of(device: torch.device, **changes: object) -> Heads:
    table = rope_table(RopeConfig(), 16, 400).to(device)
    weight = torch.rand(32, device="cpu").to(device) + 0.5
    values = {"norm_weight": weight, "window": None, "sinks": None, **changes}
    return Heads(4, 2, 16, table, eps=1e-6, **values)


def pass_rows(device: torch.device, starts: list[int], counts: list[int], most: int) -> PassRows:
    def index(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device)

    order = torch.randperm(2 * 400, generator=torch.Generator().manual_seed(1))
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    limits = [400, starts[1] + 2] + [400] * (len(starts) - 2)
    return PassRows(
        order.view(2, 400).repeat(2, 1)[: len(starts)].to(device),
        index(limits),
        index(list(range(len(starts)))),
        index(starts),
        index(firsts),
        index(counts),
        most,
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_weight": None}, {"window": 70}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}],
    ids=["qk-norm", "plain", "window", "sinks"],
)
@pytest.mark.parametrize(
    ("starts", "counts", "most"),
    [([0, 5], [3, 4], 8), ([300, 64], [1, 5], 5), ([129, 250], [14, 9], 14)],
)
def test_equals_the_reference(
    device: torch.device, changes: dict, starts: list[int], counts: list[int], most: int
) -> None:
    from peagle.ops.triton import cached_attention as kernel

    torch.manual_seed(0)
    changes = {k: v.to(device) if torch.is_tensor(v) else v for k, v in changes.items()}
    heads, rows = heads_of(device, **changes), pass_rows(device, starts, counts, most)
    qkv = torch.randn(sum(counts), 8 * 16, device="cpu").to(device)
    cache = torch.randn(2, 800, 2, 16, device="cpu").to(device)
    cpu_rows = PassRows(*(v.cpu() if torch.is_tensor(v) else v for v in vars(rows).values()))
    cpu_heads = Heads(**{k: v.cpu() if torch.is_tensor(v) else v for k, v in vars(heads).items()})
    expected_cache = cache.cpu().clone()
    expected = reference.cached_attention(qkv.cpu(), cpu_heads, expected_cache, cpu_rows)
    for _ in range(2):  # a second launch finds the arrival counters as the first one did
        attended = kernel.cached_attention(qkv, heads, cache, rows)
        torch.testing.assert_close(attended.cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cache.cpu(), expected_cache, rtol=1e-5, atol=1e-5)
