"""What of a chain needs no GPU: which it takes, and how it is cut."""

import dataclasses
from pathlib import Path

import pytest
import torch

from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.residual import BlockWeights

pytestmark = pytest.mark.usefixtures("without_mps")


def block_of(
    hidden: int = 256, heads: int = 512, inner: int = 1024, qkv: int = 320
) -> BlockWeights:
    sizes = ((heads, hidden), (hidden, 2 * inner), (inner, hidden), (hidden, qkv))
    out, gate_up, down, last = (Linear(*size).to(torch.bfloat16) for size in sizes)
    return BlockWeights(out, RMSNorm(hidden, 1e-6), gate_up, down, RMSNorm(hidden, 1e-6), last)


def attended(rows: int, heads: int = 512) -> torch.Tensor:
    return torch.zeros(rows, heads, dtype=torch.bfloat16)


def test_few_rows_of_bfloat16_without_bias_are_taken() -> None:
    from peagle.ops.triton import layer_chain

    block = block_of()
    for rows, taken in ((0, False), (1, True), (33, True), (64, True), (65, False)):
        assert layer_chain.takes(attended(rows), block) == taken
    assert not layer_chain.takes(attended(4).float(), block)
    assert layer_chain.takes(attended(4), dataclasses.replace(block, qkv=None))
    biased = Linear(256, 320, bias=True).to(torch.bfloat16)
    assert not layer_chain.takes(attended(4), dataclasses.replace(block, qkv=biased))
    assert not layer_chain.takes(attended(4), dataclasses.replace(block, down=Linear(1024, 256)))
    assert not layer_chain.takes(attended(4, heads=384), block_of(heads=384))


def test_processes_that_share_a_gpu_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peagle.ops.triton import layer_chain

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not layer_chain.takes(attended(4), block_of())
    layer_chain.is_shared.cache_clear()


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_tiles_cover_every_output_and_all_of_the_depth(rows: int) -> None:
    from peagle.ops.triton.layer_chain.shape import ChainSizes

    shape = ChainSizes(rows=rows, hidden=2560, heads=4096, inner=9728, qkv=6144, programs=132)
    for link in shape.links:
        tiles = link.units // link.programs
        assert 0 <= tiles * link.columns - link.outputs < link.columns
        assert link.steps * link.chunk * link.programs == link.depth
        assert link.bytes(rows) <= shape.slot
    assert sum(link.depth * link.outputs for link in shape.links) + 9728 * 2560 == (
        2560 * (4096 + 3 * 9728 + 6144)
    )
