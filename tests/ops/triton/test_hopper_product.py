"""On a Hopper GPU, or emulated, against the dequantised twin."""

import pytest
import torch
from test_quantized_kernels import four_bits, fp8_weight, int8_weight

from peagle.ops.norm import rms_norm
from peagle.ops.products.product import Epilogue
from peagle.ops.swiglu import GATES
from peagle.ops.weight import QuantizedWeight

FORMS = ["nvfp4", "nvfp4 divided", "int4", "int4 128", "int4 128, zeros", "int4 256"]
FORMS += ["int8", "fp8", "fp8, blocks"]
FEW = ["nvfp4", "nvfp4 divided", "int4", "int4 128", "int4 128, zeros", "int4 256"]
FEW += ["int4 256, zeros"]
"""Those of four bits, which few rows have a kernel for, too."""


def weight_of(form: str, outputs: int, depth: int) -> QuantizedWeight:
    if form == "int8":
        return int8_weight(outputs, depth)
    if form.startswith("fp8"):
        return fp8_weight(outputs, depth, block=(128, 128) if "blocks" in form else None)
    return four_bits(form, outputs, depth)


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """In units of what each output varies by: factors are far apart."""
    found, expected = found.float().cpu(), expected.float().cpu()
    return float(((found - expected).norm(dim=0) / expected.norm(dim=0)).max())


@pytest.fixture(autouse=True)
def _chosen(hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is emulated, too."""
    from peagle.ops.triton import few_rows, hopper_product
    from peagle.ops.triton.hopper_product import few

    torch.manual_seed(3)
    monkeypatch.setattr(few_rows, "on_hopper", lambda x: True)
    monkeypatch.setattr(hopper_product, "LEAST_STEPS", {4: 0, 8: 0})
    monkeypatch.setattr(hopper_product, "STEPS_OF_FEW", 0)
    monkeypatch.setattr(few, "STEPS", 0)
    plain, calls = hopper_product.launch, []
    monkeypatch.setattr(hopper_product, "launch", lambda call: (calls.append(call), plain(call))[1])
    yield
    assert calls


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        *((form, rows) for form in FORMS for rows in (17, 64)),
        *(("nvfp4", 130), ("int4 128", 100)),
        *((form, rows) for form in FEW for rows in (1, 7, 8)),
    ],
)
@torch.inference_mode()
def test_a_product_with_a_bias(hopper: torch.device, form: str, rows: int):
    """Tiles end within outputs, and most are shared by programs."""
    from peagle.ops.triton import few_rows

    weight = weight_of(form, 201, 768).to(hopper)
    x = torch.randn(rows, 768, device=hopper, dtype=torch.bfloat16)
    bias = torch.randn(201, device=hopper, dtype=torch.bfloat16)
    found = few_rows.linear(x, None, 0.0, weight, bias)
    assert far(found, x.float() @ weight.dense().float().T + bias) < 0.01


@pytest.mark.parametrize(
    ("form", "depth"),
    [
        *((form, depth) for form in ("nvfp4", "int4") for depth in (192, 384, 640, 704)),
        *(("int4 128", 384), ("int4 128, zeros", 640)),
    ],
)
@torch.inference_mode()
def test_a_depth_that_ends_within_a_step_of_few_rows(hopper: torch.device, form: str, depth: int):
    """Two tiles, of which the last one has a few outputs."""
    from peagle.ops.triton import few_rows

    weight = weight_of(form, 300, depth).to(hopper)
    x = torch.randn(3, depth, device=hopper, dtype=torch.bfloat16)
    found = few_rows.linear(x, None, 0.0, weight, None)
    assert far(found, x.float() @ weight.dense().float().T) < 0.01


@pytest.mark.parametrize(
    ("form", "rows", "depth"),
    [
        ("int4 128", 40, 256),
        *((form, 5, depth) for form in ("int4 128", "nvfp4") for depth in (256, 384, 640, 896)),
    ],
)
@torch.inference_mode()
def test_programs_go_on_in_the_next_tile(hopper: torch.device, form: str, rows: int, depth: int):
    """More tiles than programs, so that these have steps of more than one; what few rows copy
    ahead is of the next tile, or of the one behind it."""
    from peagle.ops.triton import few_rows

    tiles = (13 if hopper.type == "cpu" else 140) * (1 if rows > 8 else 2)
    outputs = (192 if rows > 8 else 256) * tiles + 8
    weight = weight_of(form, outputs, depth).to(hopper)
    x = torch.randn(rows, depth, device=hopper, dtype=torch.bfloat16)
    for _ in range(2):  # counts are at zero again
        found = few_rows.linear(x, None, 0.0, weight, None)
        assert far(found, x.float() @ weight.dense().float().T) < 0.01


@pytest.mark.parametrize(
    ("form", "rows", "outputs"),
    [
        *(("nvfp4", 33, 104), ("int4 128", 33, 104), ("fp8, blocks", 33, 104)),
        *(("nvfp4", 7, 104), ("nvfp4", 8, 300), ("int4 128", 1, 300), ("int4 128, zeros", 7, 201)),
    ],
)
@pytest.mark.parametrize("gate", GATES)
@torch.inference_mode()
def test_gates_of_a_normed_stream(
    hopper: torch.device, form: str, rows: int, outputs: int, gate: Epilogue
):
    from peagle.ops.triton import few_rows

    weight = weight_of(form, 2 * outputs, 640).to(hopper)
    x = torch.randn(rows, 640, device=hopper, dtype=torch.bfloat16)
    squares = torch.zeros(18, 64, device=hopper)
    squares[:, :rows] = x.float().square().unflatten(1, (-1, 640)).sum(2).T / 18
    found = few_rows.gated(x, squares, 1e-5, weight, gate)
    normed = rms_norm(x.float(), torch.ones(640, device=hopper), 1e-5)
    product = (normed @ weight.dense().float().T).bfloat16().float()
    assert far(found, GATES[gate](product)) < 0.01


@pytest.mark.parametrize(
    ("form", "rows", "outputs"),
    [
        *(("nvfp4", 40, 200), ("int8", 40, 200), ("nvfp4", 7, 200), ("int4 128", 1, 201)),
        *(("nvfp4", 8, 580), ("int4 128", 8, 300), ("int4 128, zeros", 3, 450)),
    ],
)
@torch.inference_mode()
def test_a_sum_and_what_its_norm_needs(
    hopper: torch.device, form: str, rows: int, outputs: int, monkeypatch: pytest.MonkeyPatch
):
    """Parts that no tile writes would be seen in the sum."""
    from peagle.ops.triton import few_rows

    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **named: plain(*a, **named).fill_(torch.nan))
    weight = weight_of(form, outputs, 384).to(hopper)
    x, stream = (torch.randn(rows, n, device=hopper, dtype=torch.bfloat16) for n in (384, outputs))
    norm = torch.rand(outputs, device=hopper, dtype=torch.bfloat16) + 0.5
    out, scaled, squares = few_rows.add(x, weight, None, stream, norm)
    product = (x.float() @ weight.dense().float().T).bfloat16().float()
    # a sum may be next to nothing, which its summands are not
    allowed = 0.01 * (product.abs() + stream.abs())
    assert ((out - (product + stream)).abs() <= allowed).all()
    assert torch.equal(scaled, (out.float() * norm.float()).bfloat16())
    found = squares.sum(0)
    torch.testing.assert_close(found[:rows], out.float().square().sum(1))
    assert not found[rows:].any()


@pytest.mark.parametrize("rows", [(64, 40), (8, 3)])
@torch.inference_mode()
def test_a_row_is_the_same_whatever_the_others_are(hopper: torch.device, rows: tuple[int, int]):
    from peagle.ops.triton import few_rows

    more, fewer = rows
    weight = weight_of("int4 128", 300, 512).to(hopper)
    x = torch.randn(more, 512, device=hopper, dtype=torch.bfloat16)
    found = few_rows.linear(x, None, 0.0, weight, None)
    again = few_rows.linear(x[:fewer].contiguous(), None, 0.0, weight, None)
    assert torch.equal(found[:fewer], again)


def test_few_rows_are_taken_where_every_program_has_some_steps(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
):
    from peagle.ops.products.product import Epilogue
    from peagle.ops.triton import few_rows, hopper_product
    from peagle.ops.triton.hopper_product import few
    from peagle.ops.triton.product_call import ProductCall

    monkeypatch.setattr(few, "STEPS", 2)
    monkeypatch.setattr(few, "multiprocessors", lambda x: 12)

    def taken(form: str, rows: int, outputs: int, fixed: bool = False) -> bool:
        x = torch.zeros(rows, 1024, device=hopper, dtype=torch.bfloat16)
        weight, out = weight_of(form, outputs, 1024), x.new_empty(rows, outputs)
        call = ProductCall(x, None, 0.0, weight, None, out, Epilogue.NONE, fixed=fixed)
        return hopper_product.takes(call)

    assert taken("int4 128", 1, 3072)
    assert taken("nvfp4", 8, 3072)
    assert not taken("int4 128", 1, 2816)
    assert not taken("int4 128", 9, 3072)
    assert not taken("int4 128", 1, 3072, fixed=True)
    assert not taken("int8", 1, 3072)
    assert not taken("int4 64", 1, 3072)
    x = torch.zeros(1, 1024, device=hopper, dtype=torch.bfloat16)
    few_rows.linear(x, None, 0.0, weight_of("int4 128", 3072, 1024).to(hopper), None)
