"""On a Hopper GPU, or emulated, against the dequantised twin."""

import pytest
import torch
from test_quantized_kernels import four_bits, fp8_weight, int8_weight

from peagle.ops.norm import rms_norm
from peagle.ops.weight import QuantizedWeight

FORMS = ["nvfp4", "nvfp4 divided", "int4", "int4 128", "int4 128, zeros", "int4 256"]
FORMS += ["int8", "fp8", "fp8, blocks"]


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

    torch.manual_seed(3)
    monkeypatch.setattr(few_rows, "on_hopper", lambda x: True)
    monkeypatch.setattr(hopper_product, "LEAST_STEPS", {4: 0, 8: 0})
    monkeypatch.setattr(hopper_product, "STEPS_OF_FEW", 0)
    plain, calls = hopper_product.launch, []
    monkeypatch.setattr(hopper_product, "launch", lambda call: (calls.append(call), plain(call))[1])
    yield
    assert calls


@pytest.mark.parametrize(
    ("form", "rows"),
    [*((form, rows) for form in FORMS for rows in (17, 64)), ("nvfp4", 130), ("int4 128", 100)],
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


@torch.inference_mode()
def test_programs_go_on_in_the_next_tile(hopper: torch.device):
    """More tiles than twelve programs, or than a GPU's, have steps of one tile alone."""
    from peagle.ops.triton import few_rows

    outputs = 192 * (13 if hopper.type == "cpu" else 140) + 8
    weight = weight_of("int4 128", outputs, 256).to(hopper)
    x = torch.randn(40, 256, device=hopper, dtype=torch.bfloat16)
    for _ in range(2):  # counts are at zero again
        found = few_rows.linear(x, None, 0.0, weight, None)
        assert far(found, x.float() @ weight.dense().float().T) < 0.01


@pytest.mark.parametrize("form", ["nvfp4", "int4 128", "fp8, blocks"])
@torch.inference_mode()
def test_gates_of_a_normed_stream(hopper: torch.device, form: str):
    from peagle.ops.triton import few_rows

    weight = weight_of(form, 2 * 104, 640).to(hopper)
    x = torch.randn(33, 640, device=hopper, dtype=torch.bfloat16)
    squares = torch.zeros(18, 64, device=hopper)
    squares[:, :33] = x.float().square().unflatten(1, (-1, 640)).sum(2).T / 18
    found = few_rows.gated(x, squares, 1e-5, weight)
    normed = rms_norm(x.float(), torch.ones(640, device=hopper), 1e-5)
    gate, up = (normed @ weight.dense().float().T).bfloat16().float().chunk(2, dim=1)
    assert far(found, torch.nn.functional.silu(gate) * up) < 0.01


@pytest.mark.parametrize("form", ["nvfp4", "int8"])
@torch.inference_mode()
def test_a_sum_and_what_its_norm_needs(hopper: torch.device, form: str):
    from peagle.ops.triton import few_rows

    weight = weight_of(form, 200, 384).to(hopper)
    x, stream = (torch.randn(40, n, device=hopper, dtype=torch.bfloat16) for n in (384, 200))
    norm = torch.rand(200, device=hopper, dtype=torch.bfloat16) + 0.5
    out, scaled, squares = few_rows.add(x, weight, None, stream, norm)
    wanted = (x.float() @ weight.dense().float().T).bfloat16().float() + stream
    assert far(out, wanted) < 0.01
    assert torch.equal(scaled, (out.float() * norm.float()).bfloat16())
    torch.testing.assert_close(squares.sum(0)[:40], out.float().square().sum(1))


@torch.inference_mode()
def test_a_row_is_the_same_whatever_the_others_are(hopper: torch.device):
    from peagle.ops.triton import few_rows

    weight = weight_of("int4 128", 300, 512).to(hopper)
    x = torch.randn(64, 512, device=hopper, dtype=torch.bfloat16)
    found = few_rows.linear(x, None, 0.0, weight, None)
    again = few_rows.linear(x[:40].contiguous(), None, 0.0, weight, None)
    assert torch.equal(found[:40], again)
