"""The memory of keys and values."""

import sys
from pathlib import Path

import pytest
import torch

from peagle.engine.kv_cache import zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_can_be_written(dtype: torch.dtype):
    made = zeros((3, 2, 5), dtype, CPU)
    assert torch.equal(made, torch.zeros(3, 2, 5, dtype=dtype))
    made[1, 0] = 7.0
    assert made.sum() == 35.0
    assert made.is_contiguous()
    assert zeros((2, 0), dtype, CPU).shape == (2, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_zeros_take_no_memory_until_they_are_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) << 12

    before = resident()
    made = zeros((1 << 28,), torch.float32, CPU)
    assert resident() - before < 1 << 26
    made[: 1 << 26] = 1.0
    assert resident() - before > 1 << 27
    assert made[-1] == 0.0
