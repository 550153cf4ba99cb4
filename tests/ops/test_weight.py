import pytest
import torch
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from peagle.errors import InputError
from peagle.ops.linear import Linear
from peagle.ops.weight import (
    FP8,
    MXFP4,
    QuantizedWeight,
    dense,
    format_of,
    fp8,
    multiply,
    replace_weight,
    weights_of,
)

EVERY = torch.arange(256, dtype=torch.uint8)


def fp8_of(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> QuantizedWeight:
    return QuantizedWeight(FP8, values.view(torch.uint8), scales, block)


def mxfp4_of(blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    return QuantizedWeight(MXFP4, blocks.flatten(-2), scales, (1, 32))


def values_of(weight: QuantizedWeight) -> torch.Tensor:
    """Of FP8: its numbers without scales."""
    return weight.packed().view(torch.float8_e4m3fn)


def random_fp8(shape: tuple[int, ...], block: tuple[int, int]) -> QuantizedWeight:
    *leading, outputs, depth = shape
    numbers = torch.randn(shape).mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(*leading, -(-outputs // block[0]), -(-depth // block[1]))
    return fp8_of(numbers, scales, block)


class TestMxfp4:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("blocks", [191, 190])
    def test_every_byte_under_every_scale_as_transformers_has_it(
        self, dtype: torch.dtype, blocks: int
    ):
        """Exactly; transformers has inputs before outputs."""
        numbers = EVERY.view(1, 16, 1, 16).expand(2, 16, blocks, 16).contiguous()
        scales = torch.arange(1, 1 + blocks, dtype=torch.uint8).expand(2, 16, blocks).contiguous()
        weight = mxfp4_of(numbers, scales)
        expected = convert_moe_packed_tensors(numbers, scales, dtype=dtype).transpose(1, 2)
        assert weight.shape == expected.shape
        assert weight.dense(dtype).dtype == dtype
        assert torch.equal(weight.dense(dtype), expected)
        assert torch.equal(weight[1].dense(dtype), expected[1])
        assert torch.equal(weight.packed(), numbers.flatten(-2))
        assert torch.equal(weight.scales[..., :blocks], scales)

    def test_a_block_by_hand(self):
        """The low half of a byte comes first; 129 is a factor of 4."""
        blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
        blocks[..., 0], blocks[..., 15] = 0x2F, 0x70
        found = mxfp4_of(blocks, torch.full((1, 1, 1), 129, dtype=torch.uint8)).dense()
        assert found[0, 0, [0, 1, 30, 31]].tolist() == [-24.0, 4.0, 0.0, 24.0]
        assert not found[0, 0, 2:30].any()

    @pytest.mark.parametrize("scale", [192, 255])
    def test_scales_that_make_no_number(self, scale: int):
        with pytest.raises(InputError, match="scales that are NaN or above"):
            MXFP4.refuse(torch.full((1, 1, 1), scale, dtype=torch.uint8))

    def test_it_takes_its_bytes_and_no_more(self):
        weight = mxfp4_of(
            torch.zeros(4, 10, 16, 16, dtype=torch.uint8), torch.ones(4, 10, 16, dtype=torch.uint8)
        )
        assert weight.nbytes == 4 * 10 * 16 * 17 == weight.numel() * 17 // 32


class TestFp8:
    @pytest.mark.parametrize("block", [(1, 96), (128, 128), (32, 64), (1, 32), (7, 5)])
    @pytest.mark.parametrize("leading", [(), (3,)])
    def test_numbers_times_the_scales_of_their_blocks(
        self, block: tuple[int, int], leading: tuple[int, ...]
    ):
        weight = random_fp8((*leading, 70, 96), block)
        found = weight.dense()
        for at in [(0, 0), (69, 95), (33, 64), (6, 5), (7, 4)]:
            scale = weight.scales[..., at[0] // block[0], at[1] // block[1]]
            wanted = values_of(weight)[..., at[0], at[1]].float() * scale
            assert torch.equal(found[..., at[0], at[1]], wanted)

    @pytest.mark.parametrize(
        ("depth", "block", "run"),
        [(256, (128, 128), 128), (256, (1, 256), 128), (256, (64, 64), 64), (96, (1, 96), 64)],
    )
    def test_halves_of_a_run_lie_side_by_side(self, depth: int, block: tuple[int, int], run: int):
        values = torch.randn(3, depth).to(torch.float8_e4m3fn)
        weight = fp8_of(values, torch.ones(3, -(-depth // block[1])), block)
        assert weight.run == run
        assert torch.equal(values_of(weight).float(), values.float())
        first = weight.numbers[:, :4].view(torch.float8_e4m3fn).float()
        assert torch.equal(first, values.float()[:, [0, run // 2, 1, run // 2 + 1]])

    def test_strips_change_nothing(self, monkeypatch: pytest.MonkeyPatch):
        weight = random_fp8((300, 64), (128, 64))
        whole = weight.dense()
        monkeypatch.setattr("peagle.ops.weight.quantized.STRIP", 64)
        assert torch.equal(weight.dense(), whole)

    def test_rounding_loses_a_sixteenth_at_most(self):
        weight = torch.randn(64, 96) * torch.logspace(-3, 3, 64)[:, None]
        weight[3] = 0
        least = weight.abs().amax(1, keepdim=True) / 448 / 512  # half a subnormal step
        error = (fp8(weight).dense() - weight).abs()
        assert (error <= weight.abs() / 16 + least).all()
        largest = fp8(weight).dense().abs().amax(1)
        torch.testing.assert_close(largest, weight.abs().amax(1), atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_lose_nothing_of_the_weight(dtype: torch.dtype):
    weight, x, bias = random_fp8((48, 64), (1, 64)), torch.randn(9, 64), torch.randn(48)
    found = multiply(x.to(dtype), weight, bias.to(dtype))
    wanted = x.to(dtype).double() @ weight.dense().double().T + bias.to(dtype).double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_a_module_that_is_cast_keeps_its_numbers():
    model = nn.ModuleList([Linear(64, 48, bias=True)])
    weight = random_fp8((48, 64), (1, 64))
    wanted = weight.dense()
    replace_weight(model, "0.weight", weight)
    assert [*weights_of(model)] == [model[0].bias, weight]
    model.to(torch.bfloat16)
    assert model[0].bias.dtype == torch.bfloat16
    assert torch.equal(model[0].weight.dense(), wanted)
    model[0].pack()
    assert model[0](torch.ones(2, 64, dtype=torch.bfloat16)).shape == (2, 48)


def test_a_tensor_is_a_weight_too():
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    assert format_of(tensor) == "bfloat16"
    assert dense(tensor) is tensor
