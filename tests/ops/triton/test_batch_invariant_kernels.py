"""Kernels of which a row does not tell how many rows it was among, against their references."""

from dataclasses import replace

import pytest
import torch
from paged_rows import KV_HEADS, LENGTH, SIZE, close, on, pass_rows, spec_of

from peagle.ops import cached_attention, moe
from peagle.ops.cached_attention import PassRows
from peagle.ops.linear import Linear
from peagle.ops.moe import ExpertWeights
from peagle.ops.norm import RMSNorm
from peagle.ops.products.choice import choose
from peagle.ops.products.few_rows import BatchInvariant
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Epilogue

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=on_a_gpu)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [1, 9, 130])
@pytest.mark.parametrize(("outputs", "depth"), [(70, 96), (128, 2304)])
def test_a_product(device: torch.device, rows: int, outputs: int, depth: int):
    """The deeper one's tiles are shared, or summed in parts where rows are many."""
    from peagle.ops.triton import few_rows as kernels

    x, weight = torch.randn(rows, depth).to(device), torch.randn(outputs, depth).to(device)
    bias = torch.randn(outputs).to(device)
    for _ in range(2):  # a second launch finds the arrival counters as the first one did
        found = kernels.invariant(x, weight, bias)
        close(found / depth**0.5, (x @ weight.T + bias) / depth**0.5)


@on_a_gpu  # the interpreter's products are numpy's, which depend on the rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "depth"), [(96, 2048), (4096, 4096), (6144, 576)])
def test_a_row_alone_is_what_it_is_among_others(
    device: torch.device, dtype: torch.dtype, outputs: int, depth: int
):
    from peagle.ops.triton import few_rows as kernels

    weight = torch.randn(outputs, depth, device=device, dtype=dtype)
    x = torch.randn(300, depth, device=device, dtype=dtype)
    whole = kernels.invariant(x, weight, None)
    wanted = x.float() @ weight.float().T
    assert (whole.float() - wanted).norm() / wanted.norm() < 4e-3
    for rows in (1, 8, 16, 32, 64, 128):
        assert torch.equal(kernels.invariant(x[:rows], weight, None), whole[:rows])


@pytest.mark.parametrize("changes", [{}, {"window": 70}, {"num_heads": 6}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_row_is_the_same_in_every_pass(
    device: torch.device, changes: dict, dtype: torch.dtype
):
    """Alone, among others of its request, and beside another request."""
    from peagle.ops.triton import cached_attention as kernel

    spec = on(device, spec_of(**changes, batch_invariant=True))
    rows = on(device, pass_rows([300, 0], [9, 16], 16))
    query = torch.randn(25, 10, SIZE, device=device, dtype=dtype)[:, : spec.num_heads]
    cache = torch.randn(2, 2 * LENGTH, KV_HEADS, SIZE, device=device, dtype=dtype)
    together = kernel.attend(query, spec, cache, rows)
    if dtype == torch.float32:
        plain = [on(torch.device("cpu"), value) for value in (spec, rows)]
        expected = cached_attention.attend(query.cpu(), plain[0], cache.cpu(), plain[1])
        close(together[:-1], expected[:-1])  # the last row has no slot
    for first, count in ((0, 1), (2, 1), (3, 4), (8, 1)):
        own = piece(rows, first, count)
        alone = kernel.attend(query[first : first + count], spec, cache, own)
        close(alone, together[first : first + count])
        if device.type == "cuda":  # numpy's products know where a row lies
            assert torch.equal(alone, together[first : first + count])


def piece(rows: PassRows, first: int, count: int) -> PassRows:
    """Some rows of the first request alone."""
    columns = {"requests": rows.requests[:1], "starts": rows.starts[:1] + first}
    columns |= {"firsts": rows.firsts[:1], "counts": torch.full_like(rows.counts[:1], count)}
    own = slice(first, first + count)
    return replace(
        rows, **columns, positions=rows.positions[own], placed=rows.placed[own], most=count
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_a_row_are_the_same_in_every_pass(device: torch.device, dtype: torch.dtype):
    from peagle.ops.triton import moe as kernels

    experts, hidden, inner = 6, 64, 96
    router = torch.randn(experts, hidden) * hidden**-0.5
    gate_up, down = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    weights = [w.to(device, dtype) for w in (router, gate_up * 0.1, down * 0.1)]
    x = torch.randn(70, hidden).to(device, dtype)
    together = kernels.moe(x, ExpertWeights(*weights, 2, True, None, True))
    if dtype == torch.float32:
        close(together, moe.moe(x.cpu(), ExpertWeights(*(w.cpu() for w in weights), 2, True)))
    for rows in (1, 8, 33) if device.type == "cuda" else ():  # not of numpy's products
        alone = kernels.moe(x[:rows], ExpertWeights(*weights, 2, True, None, True))
        assert torch.equal(alone, together[:rows])


@on_a_gpu
def test_layers_that_ask_for_it_get_it():
    layer = Linear(64, 32).cuda().bfloat16()
    x = Normed(torch.randn(8, 64).cuda().bfloat16(), None, 1e-5)
    for told in (False, True):
        layer.batch_invariant = told
        for epilogue in Epilogue:
            assert isinstance(choose(x, layer, epilogue), BatchInvariant) == told


WIDTHS = [576, 2048, 2880]


@on_a_gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_every_norm_is_the_same_to_the_last_bit(device: torch.device, width: int):
    """A prompt's last row is normed beside one addition or another, as other requests have it."""
    from peagle.ops.triton import norm as kernels

    norm = RMSNorm(width, 1e-5).to(device, torch.bfloat16).requires_grad_(False)
    stream, product = (torch.randn(3, width).to(device, torch.bfloat16) for _ in range(2))
    for total, under in (
        kernels.add_normed(product[:, None], stream, norm),
        kernels.add_normed(product[:, None].expand(-1, 2, -1).contiguous(), stream, norm),
        kernels.add(product, norm, stream, norm),
    ):
        assert torch.equal(under.x, kernels.normed(total, norm).x)
