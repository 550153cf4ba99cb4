"""On a Hopper GPU, or emulated at the smallest of the sizes."""

import dataclasses

import pytest
import torch

from peagle.ops import residual
from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.residual import BlockWeights

pytestmark = pytest.mark.usefixtures("without_mps")
SMALL = {"hidden": 256, "heads": 512, "inner": 1024, "qkv": 320}
QWEN3_4B = {"hidden": 2560, "heads": 4096, "inner": 9728, "qkv": 6144}
SEVERAL_TURNS = {"hidden": 6144, "heads": 1024, "inner": 5120, "qkv": 7168}
"""More strips of each product than an H200 has multiprocessors."""


def draw_block(device: torch.device, hidden: int, heads: int, inner: int, qkv: int) -> BlockWeights:
    sizes = ((heads, hidden), (hidden, 2 * inner), (inner, hidden), (hidden, qkv))
    layers = [Linear(*size) for size in sizes]
    norms = [RMSNorm(hidden, 1e-6), RMSNorm(hidden, 1e-5)]
    out, gate_up, down, last = (layer.to(device, torch.bfloat16) for layer in layers)
    post_norm, next_norm = (norm.to(device, torch.bfloat16) for norm in norms)
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=0.02)
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return BlockWeights(out, post_norm, gate_up, down, next_norm, last)


def draw(rows: int, block: BlockWeights) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = (block.out.weight.shape[1], len(block.out.weight))
    device, dtype = block.out.weight.device, torch.bfloat16
    attended, stream = (torch.randn(rows, n, device=device, dtype=dtype) for n in sizes)
    return attended, stream


def reference(
    attended: torch.Tensor, stream: torch.Tensor, block: BlockWeights
) -> list[torch.Tensor]:
    """On the CPU in float32: stream, its norm, q, k, v."""
    assert block.qkv is not None
    out, gate_up, down, last = map(product_of, (block.out, block.gate_up, block.down, block.qkv))
    norms = norm_of(block.post_norm), norm_of(block.next_norm)
    there = BlockWeights(out, norms[0], gate_up, down, norms[1], last)
    found, normed, qkv = residual.layer_chain(attended.float().cpu(), stream.float().cpu(), there)
    assert qkv is not None
    return [found, normed.x, qkv]


def product_of(layer: Linear) -> Linear:
    twin = Linear(layer.weight.shape[1], layer.weight.shape[0])
    twin.weight.data = layer.weight.detach().float().cpu()
    return twin


def norm_of(norm: RMSNorm) -> RMSNorm:
    twin = RMSNorm(len(norm.weight), norm.eps)
    twin.weight.data = norm.weight.detach().float().cpu()
    return twin


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    found = found.float().cpu()
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("rows", [1, 5, 8, 11, 16, 27, 45, 64])
@pytest.mark.parametrize("sizes", [SMALL, QWEN3_4B, SEVERAL_TURNS])
@torch.inference_mode()
def test_a_chain_equals_its_products(
    hopper: torch.device, rows: int, sizes: dict[str, int]
) -> None:
    from peagle.ops.triton import layer_chain

    if hopper.type != "cuda" and sizes is not SMALL:
        pytest.skip("takes minutes emulated")
    block = draw_block(hopper, **sizes)
    attended, stream = draw(rows, block)
    assert layer_chain.takes(attended, block)
    found, normed, qkv = layer_chain.layer_chain(attended, stream, block)
    expected, expected_norm, expected_qkv = reference(attended, stream, block)
    assert qkv is not None
    assert far(found, expected) < 0.006
    assert far(normed.x.float() * normed.scale(), expected_norm) < 0.01
    assert far(qkv, expected_qkv) < 0.01


@torch.inference_mode()
def test_the_last_layer_has_no_q_k_v_behind_it(hopper: torch.device) -> None:
    from peagle.ops.triton import layer_chain

    block = draw_block(hopper, **SMALL)
    attended, stream = draw(3, block)
    with_qkv = layer_chain.layer_chain(attended, stream, block)
    without = layer_chain.layer_chain(attended, stream, dataclasses.replace(block, qkv=None))
    assert without[2] is None
    assert torch.equal(without[0], with_qkv[0])
    assert torch.equal(without[1].x, with_qkv[1].x)


@pytest.mark.parametrize("rows", [8, 32, 64])
@torch.inference_mode()
def test_chains_follow_each_other_in_a_graph_with_the_same_result_every_time(
    hopper: torch.device, rows: int
) -> None:
    from peagle.ops.triton import layer_chain

    if hopper.type != "cuda":
        pytest.skip("there are no graphs without a GPU")
    block = draw_block(hopper, hidden=2048, heads=2048, inner=4096, qkv=2048)

    def three() -> torch.Tensor:
        x, at = attended, stream
        for _ in range(3):
            at, _, qkv = layer_chain.layer_chain(x, at, block)
            assert qkv is not None
            x = qkv
        return x

    attended, stream = draw(rows, block)
    expected = three()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = three()
    for _ in range(50):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [6, 20, 56])
@torch.inference_mode()
def test_a_row_of_nan_spoils_no_other(hopper: torch.device, rows: int) -> None:
    from peagle.ops.triton import layer_chain

    block = draw_block(hopper, **SMALL)
    attended, stream = draw(rows, block)
    expected = layer_chain.layer_chain(attended, stream, block)
    attended[2] = torch.nan
    found = layer_chain.layer_chain(attended, stream, block)
    others = [row for row in range(rows) if row != 2]
    assert torch.equal(found[0][others], expected[0][others])
    assert found[2] is not None
    assert expected[2] is not None
    assert torch.equal(found[2][others], expected[2][others])
    assert found[2][2].isnan().all()
