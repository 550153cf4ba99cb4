import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from peagle.errors import InputError
from peagle.models.mxfp4 import dequantised

EVERY = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_under_every_scale_as_transformers_has_it(dtype: torch.dtype):
    """Exactly; transformers has inputs before outputs."""
    blocks = EVERY.view(1, 16, 1, 16).expand(2, 16, 252, 16).contiguous()
    scales = torch.arange(1, 253, dtype=torch.uint8).expand(2, 16, 252).contiguous()
    found = dequantised(blocks, scales, dtype)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_a_block_by_hand():
    """The low half of a byte comes first; 129 is a factor of 4."""
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., 0], blocks[..., 15] = 0x2F, 0x70
    found = dequantised(blocks, torch.full((1, 1, 1), 129, dtype=torch.uint8), torch.float32)
    assert found[0, 0, [0, 1, 30, 31]].tolist() == [-24.0, 4.0, 0.0, 24.0]
    assert not found[0, 0, 2:30].any()


@pytest.mark.parametrize("scale", [253, 255])
def test_scales_that_make_no_number(scale: int):
    scales = torch.full((1, 1, 1), scale, dtype=torch.uint8)
    with pytest.raises(InputError, match="MXFP4 weights hold NaN or infinite values"):
        dequantised(EVERY[:16].view(1, 1, 1, 16), scales, torch.float32)
