"""Products and experts with packed weights against their dequantised twins."""

import warnings

import numpy as np
import pytest
import tiny
import torch

from peagle.drafters.proposer import Needs
from peagle.engine.device.worker import captures_cycles
from peagle.models.decoder import Decoder
from peagle.models.spec import DecoderSpec, ExpertsSpec, LayerSpec
from peagle.ops import moe as reference
from peagle.ops import triton
from peagle.ops.linear import Linear
from peagle.ops.moe import Clamped, ExpertWeights
from peagle.ops.norm import rms_norm
from peagle.ops.products import quantized_activations as products
from peagle.ops.products import widened
from peagle.ops.products.choice import choose
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Epilogue
from peagle.ops.products.quantized_activations import QuantizedActivations
from peagle.ops.products.widened import Widened
from peagle.ops.quantized_activations import E4M3, quantize
from peagle.ops.swiglu import GATES
from peagle.ops.weight import FP8, INT4, INT8, MXFP4, NVFP4, QuantizedWeight, replace_weight

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEPTHS = [128, 320, 192]


def fp8_weight(*shape: int, block: tuple[int, int] | None) -> QuantizedWeight:
    """Random numbers and scales; block: None for a scale each output."""
    *leading, outputs, depth = shape
    high, wide = block or (1, depth)
    numbers = torch.randn(shape).mul(30).to(torch.float8_e4m3fn)
    scales = torch.rand(*leading, -(-outputs // high), -(-depth // wide)) * 1e-3
    return QuantizedWeight(FP8, numbers.view(torch.uint8), scales, (high, wide))


def mxfp4_weight(*shape: int) -> QuantizedWeight:
    """Random numbers, with powers of two from 2**-15 on."""
    *leading, outputs, depth = shape
    blocks = torch.randint(0, 256, (*leading, outputs, depth // 32, 16), dtype=torch.uint8)
    scales = torch.randint(112, 127, (*leading, outputs, depth // 32), dtype=torch.uint8)
    return QuantizedWeight(MXFP4, blocks.flatten(-2), scales, (1, 32))


GROUPS = {"int4 32": 32, "int4 64": 64, "int4 128": 128, "int4 256": 256, "int4": None}


def four_bits(form: str, *shape: int) -> QuantizedWeight:
    """Random codes. A matrix has, as q, k and v together, three factors a hundred times apart."""
    *leading, outputs, depth = shape
    if form == "mxfp4":
        return mxfp4_weight(*shape)
    packed = torch.randint(0, 256, (*leading, outputs, depth // 2), dtype=torch.uint8)
    if form.startswith("nvfp4"):
        scales = torch.rand(*leading, outputs, depth // 16).add(0.1).to(torch.float8_e4m3fn)
        factors = torch.tensor([1e-3, 1e-2, 1e-1]).repeat_interleave(-(-outputs // 3))[:outputs]
        divided = "divided" in form
        factors = (1 / factors if divided else factors).expand(*leading, outputs)
        return QuantizedWeight(NVFP4, packed, scales, (1, 16), None, factors, divided)
    group = GROUPS[form.removesuffix(", zeros")]
    blocks = (*leading, outputs, depth // (group or depth))
    zeros = torch.randint(0, 16, blocks, dtype=torch.uint8) if "zeros" in form else None
    scales = (torch.rand(blocks) * 1e-2).to(torch.bfloat16)
    return QuantizedWeight(INT4, packed, scales, (1, group or max(depth, 128)), zeros)


def int8_weight(*shape: int) -> QuantizedWeight:
    packed = torch.randint(0, 256, shape, dtype=torch.uint8)
    return QuantizedWeight(INT8, packed, torch.rand(shape[0], 1).half() * 1e-3, (1, shape[1]))


NVFP4S = ["nvfp4", "nvfp4 divided"]
INT4S = [name + zeros for name in GROUPS for zeros in ("", ", zeros")]
FOUR_BITS = ["mxfp4", *NVFP4S, *INT4S]


def depth_for(form: str) -> int:
    """Depths that end within runs, where groups do not forbid it."""
    if form.startswith("nvfp4"):
        return 336
    if "256" in form:
        return 768
    return 384 if "128" in form else 352 if form.startswith(("mxfp4", "int4 32")) else 320


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 7, 16, 64, 130])
@pytest.mark.parametrize("form", [*FOUR_BITS, "int8"])
def test_a_product_of_few_bits(device: torch.device, rows: int, form: str):
    """With an odd number of outputs."""
    from peagle.ops.triton import few_rows as kernels
    from peagle.ops.triton import skinny_product

    made = int8_weight(201, 320) if form == "int8" else four_bits(form, 201, depth_for(form))
    weight = made.to(device)
    assert skinny_product.takes(weight, weight.device)
    x, bias = torch.randn(rows, weight.shape[1]).to(device), torch.randn(201).to(device)
    found, wanted = kernels.linear(x, None, 1e-5, weight, bias), x @ weight.dense().T + bias
    scale = weight.dense().abs().amax(1) * weight.shape[1] ** 0.5  # factors are far apart
    assert ((found - wanted).abs() <= 1e-5 * scale + 1e-5).all()


@pytest.mark.parametrize("form", [*FOUR_BITS, "int8", "int8, zeros", "fp8", "fp8, blocks"])
def test_strips_are_widened_to_what_they_stand_for(device: torch.device, form: str):
    from peagle.ops.triton import widened as kernels

    if form.startswith("int8"):
        weight = int8_weight(45, 320)
        if "zeros" in form:
            zeros = torch.randint(0, 256, (45, 1), dtype=torch.uint8)
            weight = QuantizedWeight(INT8, weight.packed(), weight.scales, (1, 320), zeros)
    elif form.startswith("fp8"):
        weight = fp8_weight(45, 320, block=(32, 64) if "blocks" in form else None)
    else:
        weight = four_bits(form, 45, depth_for(form))
    found = kernels.widened(weight.to(device), slice(7, 41), torch.float32)
    torch.testing.assert_close(found.cpu(), weight.cpu().dense()[7:41], atol=0, rtol=3e-7)


@pytest.mark.parametrize(("depth", "whole"), [(72, False), (320, True)])
def test_eight_bits_are_widened_first_where_runs_are_whole(depth: int, whole: bool):
    layer = Linear(depth, 48)
    replace_weight(layer, "weight", int8_weight(48, depth))
    given = Normed(torch.zeros(513, depth), None, 0.0)
    assert Widened().takes(given, layer, Epilogue.NONE) == whole


def test_many_rows_are_multiplied_by_what_is_widened_first(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """In strips of aligned lines, whatever the norm and the bias."""
    from peagle.ops.triton import widened as kernels

    monkeypatch.setattr(triton, "has_kernels", lambda x: True)
    monkeypatch.setattr(widened, "STRIP", 77 * 320)
    monkeypatch.setattr(widened, "ALIGNED", 32)
    plain, strips = kernels.widened, []
    monkeypatch.setattr(kernels, "widened", lambda *a: (strips.append(a[1]), plain(*a))[1])
    layer = Linear(320, 200, bias=True).to(device)
    torch.nn.init.normal_(layer.bias)
    replace_weight(layer, "weight", four_bits("nvfp4", 200, 320).to(device))
    x = torch.randn(513, 320).to(device)
    given = Normed(x, x.square().sum(1)[None], 1e-5)
    kernel = choose(given, layer, Epilogue.NONE)
    assert isinstance(kernel, Widened)
    wanted = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() @ layer.weight.dense().T
    torch.testing.assert_close(kernel.linear(given, layer), wanted + layer.bias)
    assert [(strip.start, strip.stop) for strip in strips] == [
        *((0, 64), (64, 128), (128, 192), (192, 200))
    ]
    assert not isinstance(choose(Normed(x[:512], None, 1e-5), layer, Epilogue.NONE), Widened)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "int4 64, zeros"])
def test_a_norm_a_gate_and_an_addition_of_four_bits(device: torch.device, form: str):
    """Depths that programs share."""
    from peagle.ops.triton import few_rows as kernels

    down, up = (four_bits(form, *s).to(device) for s in ((96, 2304), (384, 96)))
    x, stream, norm = (torch.randn(size).to(device) for size in ((5, 2304), (5, 96), (96,)))
    total, scaled, squares = kernels.add(x, down, None, stream, norm)
    wanted = stream + x @ down.dense().T
    torch.testing.assert_close(total, wanted, atol=1e-3, rtol=1e-4)
    under = rms_norm(wanted, norm, 1e-5)
    gate, value = (under @ up.dense().T).chunk(2, dim=-1)
    found = kernels.gated(scaled, squares, 1e-5, up, Epilogue.GATE)
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * value, atol=1e-3, rtol=1e-3)


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 8, 33, 130])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("block", [None, (128, 128), (1, 128), (64, 64)])
def test_a_product(device: torch.device, rows: int, depth: int, block: tuple[int, int] | None):
    from peagle.ops.triton import few_rows as kernels

    weight = fp8_weight(200, depth, block=block).to(device)
    x, bias = torch.randn(rows, depth).to(device), torch.randn(200).to(device)
    found = kernels.linear(x, None, 1e-5, weight, bias)
    torch.testing.assert_close(found, x @ weight.dense().T + bias, atol=1e-4, rtol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 20, 64])
@pytest.mark.parametrize("block", [None, (128, 128)])
def test_a_norm_a_gate_and_an_addition(
    device: torch.device, rows: int, block: tuple[int, int] | None
):
    """A row's way through an output projection, gate and up, and down."""
    from peagle.ops.triton import few_rows as kernels

    first, second = (fp8_weight(*s, block=block).to(device) for s in ((256, 128), (384, 256)))
    x, stream, norm = (torch.randn(size).to(device) for size in ((rows, 128), (rows, 256), (256,)))
    total, scaled, squares = kernels.add(x, first, None, stream, norm)
    wanted = stream + x @ first.dense().T
    torch.testing.assert_close(total, wanted, atol=1e-4, rtol=1e-4)
    under = rms_norm(wanted, norm, 1e-5)
    product = kernels.linear(scaled, squares, 1e-5, second, None)
    torch.testing.assert_close(product, under @ second.dense().T, atol=1e-3, rtol=1e-3)
    gate, up = (under @ second.dense().T).chunk(2, dim=-1)
    found = kernels.gated(scaled, squares, 1e-5, second, Epilogue.GATE)
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, atol=1e-3, rtol=1e-3)


def test_multiprocessors_have_like_numbers_of_programs():
    from peagle.ops.triton.skinny_product import TOGETHER, splits_of

    # of 80 tiles four programs each are two or three a multiprocessor, six are three or four
    assert splits_of(5120, 6144, 3 * 132, 132) == 6
    assert splits_of(5120, 5120, 3 * 132, 132) == 4  # of six none would have a thousand inputs
    assert splits_of(16384, 5120, 3 * 132, 132) == 1
    assert splits_of(9216, 8192, 3 * 132, 132) * 144 <= TOGETHER * 132


@on_a_gpu  # the interpreter's products are numpy's, which depend on the rows
def test_a_row_alone_is_what_it_is_among_others(device: torch.device):
    """How the depth is divided does not depend on the rows."""
    from peagle.ops.triton import few_rows as kernels
    from peagle.ops.triton import skinny_product

    weight = fp8_weight(96, 2048, block=(128, 128)).to(device)
    assert skinny_product.splits_of(96, 2048, 3 * 132, 132) > 1
    x = torch.randn(64, 2048).to(device)
    whole = kernels.linear(x, None, 1e-5, weight, None)
    for rows in (1, 8, 16, 32):
        assert torch.equal(kernels.linear(x[:rows], None, 1e-5, weight, None), whole[:rows])


@on_a_gpu  # bits move in the registers of a GPU
@pytest.mark.parametrize("rows", [1, 16, 64, 200])
@pytest.mark.parametrize("block", [None, (128, 128), (64, 64)])
def test_a_product_in_bfloat16(device: torch.device, rows: int, block: tuple[int, int] | None):
    from peagle.ops.triton import few_rows as kernels

    weight = fp8_weight(512, 1152, block=block).to(device)
    x = torch.randn(rows, 1152).to(device, torch.bfloat16)
    found = kernels.linear(x, None, 1e-5, weight, None)
    wanted = x.float() @ weight.dense().T
    torch.testing.assert_close(found, wanted.bfloat16(), atol=2e-3, rtol=1e-2)
    for gate, gated in GATES.items():
        found = kernels.gated(x, None, 1e-5, weight, gate)
        expected = gated(wanted.bfloat16().float()).bfloat16()
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)


@on_a_gpu
@pytest.mark.parametrize("rows", [1, 16, 64, 200])
@pytest.mark.parametrize("form", [*FOUR_BITS, "int8"])
def test_a_product_of_few_bits_in_bfloat16(device: torch.device, rows: int, form: str):
    from peagle.ops.triton import few_rows as kernels

    made = int8_weight(200, 1152) if form == "int8" else four_bits(form, 200, 2 * depth_for(form))
    weight = made.to(device)
    x = torch.randn(rows, weight.shape[1]).to(device, torch.bfloat16)
    found = kernels.linear(x, None, 1e-5, weight, None).float()
    wanted = x.float() @ weight.dense().T
    assert ((found - wanted).norm(dim=0) <= 6e-3 * wanted.norm(dim=0)).all()


def numpy_is_invariant() -> bool:
    """Whether numpy, by which kernels are interpreted, adds up alike whatever a product's width:
    it does not on every processor."""
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal(size).astype(np.float32) for size in ((64, 128), (128, 128)))
    widths = (16, 32, 64)
    return all(np.array_equal(a @ b[:, :width].copy(), (a @ b)[:, :width]) for width in widths)


@pytest.mark.parametrize("form", ["fp8", *FOUR_BITS, "int8"])
def test_a_row_alone_is_the_same_with_batch_invariance(device: torch.device, form: str):
    """FP8's depth has an odd number of runs of 64 inputs."""
    from peagle.ops.triton import few_rows as kernels

    if device.type == "cpu" and not numpy_is_invariant():
        pytest.skip("numpy's sums depend on a product's width on this processor")
    if form == "fp8":
        weight = fp8_weight(200, 576, block=None).to(device)
    else:
        made = int8_weight(200, 576) if form == "int8" else four_bits(form, 200, depth_for(form))
        weight = made.to(device)
    # bits move in the registers of a GPU
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(200, weight.shape[1]).to(device, dtype)
    whole = kernels.invariant(x, weight, None)
    for rows in (1, 8, 16, 32, 64, 128):
        assert torch.equal(kernels.invariant(x[:rows], weight, None), whole[:rows])


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 16, 21])
@pytest.mark.parametrize(
    ("depth", "group", "run"), [(512, 128, 128), (384, 128, 64), (320, 320, 64)]
)
def test_activations_are_rounded_as_by_the_reference(
    device: torch.device, rows: int, depth: int, group: int, run: int
):
    from peagle.ops.triton import quantized_activations as kernels

    x = torch.randn(rows, depth) * torch.rand(rows, 1) * 50
    x[0, :group] = 0.0
    wanted = quantize(x, group, run)
    numbers, scales = kernels.quantize(x.to(device), group, run)
    assert numbers.shape == (-(-rows // 16) * 16, depth)
    assert scales.T.is_contiguous()
    torch.testing.assert_close(scales.cpu(), wanted.scales)
    ours, theirs = numbers.cpu().float(), wanted.numbers.float()
    if device.type == "cpu":
        # the interpreter halves what is rounded up to a power of two
        power = wanted.numbers.view(torch.uint8) & 7 == 0
        ours = torch.where(power & (ours * 2 == theirs), theirs, ours)
    # a number halfway between two may go either way, a step of 1/8 at most
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0.13)
    assert (ours == theirs).float().mean() > 0.99
    assert not ours[rows:].any()


@pytest.mark.parametrize("group", [128, 512])
def test_rounded_activations_lie_in_the_order_of_a_weights_numbers(group: int):
    """Numbers times numbers, each with its scales, are nearly the product that is meant."""
    weight = fp8_weight(32, 512, block=None)
    x = torch.randn(20, 512)
    rounded = quantize(x, group, weight.run)
    repeated = rounded.scales.repeat_interleave(group, 1)
    found = (rounded.numbers.float() * repeated) @ weight.numbers.view(E4M3).float().T
    wanted = x @ weight.dense().T
    error = (found[:20] * weight.scales.T - wanted).norm() / wanted.norm()
    assert error < 0.05


@on_a_gpu
@pytest.mark.parametrize("rows", [129, 512, 1003])
@pytest.mark.parametrize("block", [None, (128, 128)])
def test_a_product_of_rounded_activations(
    device: torch.device, rows: int, block: tuple[int, int] | None
):
    layer, x = dynamic_layer(1024, 4096, block).to(device), torch.randn(rows, 4096).to(device)
    given = Normed(x.bfloat16(), None, 1e-5)
    kernel = choose(given, layer, Epilogue.NONE)
    assert isinstance(kernel, QuantizedActivations)
    run = layer.weight.run
    rounded = quantize(given.x, 128 if block else 4096, run)
    inputs = rounded.numbers.float() * rounded.scales.repeat_interleave(128 if block else 4096, 1)
    ordered = FP8.ordered(layer.weight.dense(), run)
    wanted = (inputs @ ordered.T)[:rows]
    found = kernel.linear(given, layer)
    torch.testing.assert_close(found, wanted.bfloat16(), atol=5e-3, rtol=2e-2)


def rounds(rows: int, layer: Linear, dtype: torch.dtype = torch.bfloat16) -> bool:
    x = Normed(torch.zeros(rows, layer.weight.shape[1], dtype=dtype), None, 1e-5)
    return isinstance(choose(x, layer, Epilogue.NONE), QuantizedActivations)


def test_few_rows_keep_their_activations(monkeypatch: pytest.MonkeyPatch):
    """And so do weights that no one said are made for it, other types, and other GPUs."""
    layer = dynamic_layer(128, 512, (128, 128))
    assert not rounds(65, layer)
    monkeypatch.setattr(triton, "has_kernels", lambda x: True)
    monkeypatch.setattr(products, "on_hopper", lambda x: True)
    assert rounds(65, layer)
    assert not rounds(64, layer)
    assert not rounds(65, layer, torch.float16)
    layer.weight.dynamic_activations = False
    assert not rounds(65, layer)


@pytest.mark.parametrize(
    ("outputs", "depth", "block", "wanted"),
    [
        (144, 576, None, True),
        (200, 576, None, False),
        (144, 1024, (128, 128), True),
        (144, 640, (128, 128), False),
        (144, 1024, (1, 128), False),
        (144, 1024, (64, 64), False),
    ],
)
def test_blocks_that_cublas_multiplies(
    outputs: int,
    depth: int,
    block: tuple[int, int] | None,
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(triton, "has_kernels", lambda x: True)
    monkeypatch.setattr(products, "on_hopper", lambda x: True)
    assert rounds(65, dynamic_layer(outputs, depth, block)) == wanted


def dynamic_layer(outputs: int, depth: int, block: tuple[int, int] | None) -> Linear:
    layer = Linear(depth, outputs)
    weight = fp8_weight(outputs, depth, block=block)
    weight.dynamic_activations = True
    replace_weight(layer, "weight", weight)
    return layer


def test_a_gpu_without_fp8_widens_whole_weights_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    """Not experts in MXFP4, whose bits are moved; and layers with experts are not captured."""
    from peagle.ops.triton import experts as products
    from peagle.ops.triton import skinny_product

    dense, old, new = fp8_weight(64, 128, block=None), torch.device("cuda", 6), (8, 9)
    experts = expert_weights("rows", 2, 128, 128)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (8, 0) if d == old else new)
    monkeypatch.setattr(QuantizedWeight, "device", old)
    with warnings.catch_warnings(record=True, action="always") as told:
        assert not skinny_product.takes(dense, old)
        assert not any(map(products.takes, experts))
    said = ["A100 has no FP8 instructions: FP8 weights are slow on it"]
    assert [str(warning.message) for warning in told] == said
    assert all(map(products.takes, expert_weights("mxfp4", 2, 128, 128)))
    assert skinny_product.takes(dense, torch.device("cuda", 7))


@pytest.mark.parametrize(("inner", "captured"), [(128, True), (96, False)])
def test_experts_without_kernels_are_not_captured(
    monkeypatch: pytest.MonkeyPatch, inner: int, captured: bool
):
    """A graph cannot hold plain torch's, which ask which experts are chosen."""
    layer = ExpertsSpec(4, 2, inner, inner, True)
    decoder = Decoder(
        DecoderSpec(64, 128, (LayerSpec(tiny.ATTENTION, layer),), max_length=16), max_length=16
    )
    mlp = decoder.requires_grad_(False).layers[0].mlp
    for name, weight in zip(
        ("gate_up", "down"), expert_weights("rows", 4, 128, inner), strict=True
    ):
        replace_weight(mlp, name, weight)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    with warnings.catch_warnings(record=True, action="always") as told:
        assert captures_cycles(decoder, Needs()) == captured
    said = ["no GPU kernels for these experts' weights: running plain torch"]
    assert [str(warning.message) for warning in told] == ([] if captured else said)


def expert_weights(form: str, experts: int, hidden: int, inner: int) -> list[QuantizedWeight]:
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    if form in FOUR_BITS:
        return [four_bits(form, *shape) for shape in shapes]
    block = (128, 128) if form == "blocks" else None
    return [fp8_weight(*shape, block=block) for shape in shapes]


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize(("hidden", "inner"), [(128, 256), (192, 320)])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "int4 64", "int4 32, zeros", "blocks", "rows"])
@pytest.mark.parametrize("biases", [False, True])
def test_experts(device: torch.device, rows: int, hidden: int, inner: int, form: str, biases: bool):
    from peagle.ops.triton import moe as kernels

    if form == "blocks" and inner % 128:
        pytest.skip("blocks end within an expert's gate: such are kept by rows")
    router = (torch.randn(6, hidden) * hidden**-0.5).to(device)
    gate_up, down = (w.to(device) for w in expert_weights(form, 6, hidden, inner))
    x = (torch.randn(rows, hidden) * 0.1).to(device)
    clamped = None
    if biases:
        given = (torch.randn(6), torch.randn(6, 2 * inner), torch.randn(6, hidden))
        clamped = Clamped(*(bias.to(device) for bias in given), 0.8)
    found = kernels.moe(x, ExpertWeights(router, gate_up, down, 2, True, clamped))
    dense = gate_up.dense(), down.dense()
    wanted = reference.moe(x, ExpertWeights(router, *dense, 2, True, clamped))
    scale = wanted.abs().max().item()
    torch.testing.assert_close(found / scale, wanted / scale, atol=2e-5, rtol=2e-5)


@on_a_gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 512])
@pytest.mark.parametrize("form", ["mxfp4", "rows", "blocks"])
def test_experts_in_bfloat16(device: torch.device, rows: int, form: str):
    from peagle.ops.triton import moe as kernels

    hidden, inner = (480, 544) if form == "mxfp4" else (512, 384)  # 32 more than whole runs
    router = (torch.randn(6, hidden) * hidden**-0.5).to(device, torch.bfloat16)
    gate_up, down = (w.to(device) for w in expert_weights(form, 6, hidden, inner))
    x = (torch.randn(rows, hidden) * 0.1).to(device, torch.bfloat16)
    found = kernels.moe(x, ExpertWeights(router, gate_up, down, 2, True))
    dense = (weight.dense(torch.bfloat16) for weight in (gate_up, down))
    wanted = kernels.moe(x, ExpertWeights(router, *dense, 2, True))
    error = (found - wanted).float().norm() / wanted.float().norm()
    assert error < (4e-3 if form == "mxfp4" else 8e-3)  # scaled FP8 is rounded once more there
