import pytest
import torch
from torch import Tensor

from peagle.ops import moe as reference
from peagle.ops import triton
from peagle.ops.linear import Linear
from peagle.ops.moe import Clamped, Experts, ExpertWeights
from peagle.ops.norm import RMSNorm, rms_norm
from peagle.ops.products.normed import Normed
from peagle.ops.residual import Beside, add_mixture

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [(6, 2), (5, 5), (24, 4), (1, 1)]
"""Experts and how many of them a row has."""
ROWS = [0, 1, 5, 16, 17, 33, 70]
"""Up to 16 all are routed at once, and an expert's fit one block."""


def made(experts: int, hidden: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    """A router's weight, and the experts' gate and up, and down."""
    sizes = ((experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
    router, gate_up, down = (torch.randn(size) * size[-1] ** -0.5 for size in sizes)
    return router, gate_up, down


def clamp(weights: tuple[Tensor, ...], limit: float = 0.8) -> Clamped:
    """GPT-OSS's form of some experts, with a limit that their activations reach."""
    biases = (torch.randn(weight.shape[:-1]).to(weight) for weight in weights)
    return Clamped(*biases, limit)


def assert_equal_to_the_reference(
    x: Tensor,
    weights: tuple[Tensor, ...],
    top_k: int,
    normalize: bool,
    atol: float = 1e-5,
    clamped: Clamped | None = None,
) -> None:
    from peagle.ops.triton import moe as kernels

    result = kernels.moe(x, ExpertWeights(*weights, top_k, normalize, clamped))
    expected = reference.moe(x, ExpertWeights(*weights, top_k, normalize, clamped))
    torch.testing.assert_close(result, expected, atol=atol, rtol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_any_rows_and_experts(device: torch.device, rows: int, experts: int, top_k: int):
    x = torch.randn(rows, 40).to(device)
    weights = tuple(weight.to(device) for weight in made(experts, 40, 24))
    assert_equal_to_the_reference(x, weights, top_k, normalize=experts % 2 == 0)


@pytest.mark.parametrize("rows", ROWS)
def test_experts_with_biases_and_a_limit(device: torch.device, rows: int):
    """As GPT-OSS's are; 17 numbers do not fill a strip."""
    x = torch.randn(rows, 40).to(device)
    weights = tuple(weight.to(device) for weight in made(6, 40, 17))
    assert_equal_to_the_reference(x, weights, 2, normalize=True, clamped=clamp(weights))


@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (192, 16), (33, 130)])
def test_sizes_of_several_steps_and_strips(device: torch.device, hidden: int, inner: int):
    x = torch.randn(7, hidden).to(device)
    weights = tuple(weight.to(device) for weight in made(4, hidden, inner))
    assert_equal_to_the_reference(x, weights, 2, normalize=True)


@pytest.mark.parametrize(("rows", "block"), [(9, 16), (60, 32), (100, 64), (300, 128)])
def test_half_the_bytes_and_every_size_of_tile(device: torch.device, rows: int, block: int):
    """In float16; the interpreter computes bfloat16 wrongly."""
    from peagle.ops.triton import moe as kernels

    assert kernels.block_for(rows * 2 / 8, torch.float16) == block
    x = torch.randn(rows, 64).to(device).half()
    weights = tuple(weight.to(device).half() for weight in made(8, 64, 32))
    assert_equal_to_the_reference(x, weights, 2, normalize=True, atol=4e-3)


@pytest.mark.parametrize(("most", "sizes"), [(64, 1), (200, 2), (300, 3)])
def test_warming_up_meets_every_size_of_tile_that_passes_reach(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, most: int, sizes: int
):
    """But the smallest, which any pass of few rows has."""
    from peagle.ops.triton import moe as kernels

    met, block_for = [], kernels.block_for
    monkeypatch.setattr(kernels, "block_for", lambda *args: met.append(block_for(*args)) or met[-1])
    monkeypatch.setattr(triton, "has_kernels", lambda x: True)
    experts = Experts(16, 8, 8, 2, normalize=True).requires_grad_(False)
    experts.router.data, experts.gate_up.data, experts.down.data = made(8, 16, 8)
    experts.to(device).half().warm_up(most)
    assert met == [32, 64, 128][:sizes]


@pytest.mark.parametrize("rows", [4, 30])
def test_rows_that_all_ask_the_same_experts(device: torch.device, rows: int):
    """So most have no block, and with 30 rows those asked have several."""
    x = torch.randn(1, 40).expand(rows, 40).to(device)
    weights = tuple(weight.to(device) for weight in made(16, 40, 24))
    assert_equal_to_the_reference(x, weights, 3, normalize=True)


@pytest.mark.parametrize("rows", [4, 30])
def test_experts_equally_likely(device: torch.device, rows: int):
    x = torch.randn(rows, 40).to(device)
    router, gate_up, down = (weight.to(device) for weight in made(8, 40, 24))
    router[1::2] = router[::2]
    assert_equal_to_the_reference(x, (router, gate_up, down), 3, normalize=True)


@pytest.mark.parametrize("rows", [6, 20])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_that_is_not_a_number_harms_no_other(device: torch.device, rows: int):
    from peagle.ops.triton import moe as kernels

    x = torch.randn(rows, 40).to(device)
    weights = tuple(weight.to(device) for weight in made(8, 40, 24))
    expected = kernels.moe(x, ExpertWeights(*weights, 3, True))
    x[2] = float("nan")
    result = kernels.moe(x, ExpertWeights(*weights, 3, True))
    others = [row for row in range(rows) if row != 2]
    # the interpreter multiplies by BLAS, which may round by a row's place among others
    allowed = 0 if device.type == "cuda" else 1e-6
    torch.testing.assert_close(result[others], expected[others], atol=allowed, rtol=allowed)
    assert result[2].isnan().all()


@pytest.mark.parametrize("rows", [4, 20])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_whose_router_overflows_is_not_a_number(
    device: torch.device, rows: int, normalize: bool
):
    """Though the row itself is one, and its experts are: it must not pass for one without any."""
    from peagle.ops.triton import moe as kernels

    x = torch.randn(rows, 40).to(device).half()
    router, gate_up, down = (weight.to(device).half() for weight in made(8, 40, 24))
    router *= 400
    x[1] = 100 * router[0].sign()
    result = kernels.moe(x, ExpertWeights(router, gate_up, down, 2, normalize))
    expected = reference.moe(x, ExpertWeights(router, gate_up, down, 2, normalize))
    assert expected[1].isnan().all()
    torch.testing.assert_close(result, expected, atol=4e-3, rtol=1e-5, equal_nan=True)


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 70])
@pytest.mark.parametrize("block", [16, 64])
def test_pairs_are_ordered_and_cut_into_blocks(
    device: torch.device, rows: int, block: int, monkeypatch: pytest.MonkeyPatch
):
    from peagle.ops.triton import expert_blocks
    from peagle.ops.triton import routing as kernels

    monkeypatch.setattr(expert_blocks, "CHUNKS", (128, 64))
    logits = torch.randn(rows, 12).to(device)
    nothing = torch.empty(0, device=device)
    experts = ExpertWeights(torch.eye(12, device=device), nothing, nothing, 4, normalize=True)
    routing = kernels.route(Normed(logits, None, 0.0), experts, block)
    chosen = logits.softmax(dim=-1).topk(4).indices.flatten()
    assert routing.layout.order.tolist() == chosen.argsort(stable=True).tolist()
    laid, count = 0, int(routing.layout.num_blocks)
    for expert, first, past in routing.layout.blocks[:count].tolist():
        assert first == laid
        assert 0 < past - first <= block
        assert bool((chosen.sort().values[first:past] == expert).all())
        laid = past
    assert laid == rows * 4
    assert count <= expert_blocks.most_blocks(rows * 4, 12, block)


def test_the_module_takes_the_kernels_where_they_serve(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    from peagle.ops.triton import moe as kernels

    monkeypatch.setattr(triton, "has_kernels", lambda x: True)
    module = Experts(40, 24, 8, 3, normalize=True).requires_grad_(False)
    module.router.data, module.gate_up.data, module.down.data = made(8, 40, 24)
    module, x = module.to(device), torch.randn(4, 40).to(device)
    expected = kernels.moe(x, ExpertWeights(module.router, module.gate_up, module.down, 3, True))
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize(
    ("rows", "scaled"), [*((rows, False) for rows in ROWS), *((rows, True) for rows in ROWS[:-1])]
)
def test_the_sum_with_a_stream_and_its_norm(device: torch.device, rows: int, scaled: bool):
    """As in a layer: a stream's squares come in parts, in rows of a tile, up to 64 of them."""
    from peagle.ops.triton import moe as kernels
    from peagle.ops.triton.tiles import padded

    stream, before = (torch.randn(rows, 40).to(device) for _ in range(2))
    norms = [torch.rand(40).to(device) + 0.5 for _ in range(2)]
    norm = RMSNorm(40, 1e-6).to(device).requires_grad_(False)
    norm.weight.copy_(norms[1])
    weights = tuple(weight.to(device) for weight in made(6, 40, 17))
    clamped = clamp(weights) if rows % 2 else None
    normed = rms_norm(before, norms[0], 1e-5)
    x = Normed(normed, None, 1e-5)
    if scaled:
        squares = torch.zeros(3, padded(rows), device=device)
        parts = (before[:, :16], before[:, 16:32], before[:, 32:])
        squares[:, :rows] = torch.stack([part.square().sum(dim=1) for part in parts])
        x = Normed(before * norms[0], squares, 1e-5)
    limit = None if clamped is None else clamped.limit
    experts = Experts(40, 17, 6, 2, True, limit).requires_grad_(False)
    experts.router.data, experts.gate_up.data, experts.down.data = weights
    if clamped is not None:
        given = clamped.router, clamped.gate_up, clamped.down
        experts.router_bias.data, experts.gate_up_bias.data, experts.down_bias.data = given
    total, out = kernels.add_mixture(x, experts, stream, norm)
    expected = stream + reference.moe(normed, ExpertWeights(*weights, 2, True, clamped))
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.x, rms_norm(expected, norms[1], 1e-6), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_beside_experts_is_added_through_a_gate(device: torch.device, scaled: bool):
    from peagle.ops.triton import moe as kernels

    stream, added = (torch.randn(5, 40).to(device) for _ in range(2))
    own, norm = (RMSNorm(40, eps).to(device).requires_grad_(False) for eps in (1e-2, 1e-6))
    own.weight.copy_(torch.rand(40) + 0.5)
    experts = Experts(40, 24, 8, 3, normalize=True).requires_grad_(False)
    experts.router.data, experts.gate_up.data, experts.down.data = made(8, 40, 24)
    gate = Linear(40, 1).requires_grad_(False)
    gate.weight.copy_(torch.randn(1, 40))
    experts, gate = experts.to(device), gate.to(device)
    normed = rms_norm(stream, own.weight, 1e-2)
    x = Normed(normed, None, 1e-2)
    if scaled:
        x = Normed(stream * own.weight, stream.square().sum(dim=1)[None], 1e-2)
    total, out = kernels.add_mixture(x, experts, stream, norm, Beside(added, gate, x))
    expected = stream + added * (normed @ gate.weight.T).sigmoid()
    expected += reference.moe(normed, experts.weights())
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.x, rms_norm(expected, norm.weight, 1e-6), atol=1e-5, rtol=1e-5)
    given = Normed(normed, None, 1e-2)
    found, _ = add_mixture(given, experts, stream, norm, Beside(added, gate, given))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_layer_s_mixture_is_the_same_with_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    experts = Experts(40, 24, 8, 3, normalize=True).requires_grad_(False)
    experts.router.data, experts.gate_up.data, experts.down.data = made(8, 40, 24)
    experts, norm = experts.to(device), RMSNorm(40, 1e-6).to(device).requires_grad_(False)
    x, stream = (torch.randn(5, 40).to(device) for _ in range(2))
    total = stream + reference.moe(x, experts.weights())
    for fast in (False, True):
        monkeypatch.setattr(triton, "has_kernels", lambda x, fast=fast: fast)
        found, normed = add_mixture(Normed(x, None, 1e-6), experts, stream, norm)
        torch.testing.assert_close(found, total, atol=1e-5, rtol=1e-5)
        expected = rms_norm(total, norm.weight, 1e-6)
        torch.testing.assert_close(normed.x, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("pairs", "experts", "most"), [(0, 8, 0), (8, 8, 8), (24, 8, 9), (3, 8, 3)]
)
def test_the_worst_number_of_blocks(pairs: int, experts: int, most: int):
    from peagle.ops.triton.expert_blocks import most_blocks

    assert most_blocks(pairs, experts, 16) == most


@on_a_gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 500, 4096])
def test_bfloat16_at_a_real_model_s_sizes(rows: int):
    gpu = torch.device("cuda")
    x = torch.randn(rows, 2048).to(gpu).bfloat16()
    weights = tuple(weight.to(gpu).bfloat16() for weight in made(128, 2048, 768))
    assert_equal_to_the_reference(x, weights, 8, normalize=True, atol=0.03)


@on_a_gpu
@pytest.mark.parametrize("rows", [1, 8, 500])
def test_bfloat16_at_gpt_oss_s_sizes(rows: int):
    gpu = torch.device("cuda")
    x = torch.randn(rows, 2880).to(gpu).bfloat16()
    weights = tuple(weight.to(gpu).bfloat16() for weight in made(32, 2880, 2880))
    assert_equal_to_the_reference(x, weights, 4, True, atol=0.1, clamped=clamp(weights, 7.0))


@on_a_gpu
@pytest.mark.parametrize("rows", [4, 100])
def test_a_graph_follows_its_input(rows: int):
    """Captured with one routing and replayed with another."""
    gpu = torch.device("cuda")
    module = Experts(128, 64, 16, 4, normalize=True).to(gpu).requires_grad_(False)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(rows, 128, device=gpu)
    module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = module(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    weights = (module.router, module.gate_up, module.down)
    torch.testing.assert_close(
        result, reference.moe(x, ExpertWeights(*weights, 4, True)), atol=1e-4, rtol=1e-4
    )
