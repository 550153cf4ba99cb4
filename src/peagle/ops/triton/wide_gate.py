"""SwiGLU of hundreds of rows, computed while its product is still in registers.

A product of cuBLAS is written and read again, and in a captured cycle it has as many rows as there
is room for; here tiles after the last live row are left out. One program on each multiprocessor
goes from tile to tile. One of its warps loads the next tile while this one is written; two groups
of four multiply 64 rows each.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.ops.triton.gluon import digest, meet, ring_barriers
from peagle.ops.triton.launch import multiprocessors

HEIGHT, WIDTH = gl.constexpr(128), gl.constexpr(128)
"""Rows and outputs of a tile."""
LINES = gl.constexpr(256)
"""Rows of the weight that a tile reads: its gates, then what they gate."""
DEPTH = gl.constexpr(64)
"""Columns that a step reads."""
STAGES = gl.constexpr(4)
"""Steps that fit into shared memory, beside a tile that is being written."""
LOADER_REGISTERS = gl.constexpr(40)
LAYOUT, LAYOUT3 = (gl.NVMMASharedLayout(128, 16, rank=rank) for rank in (2, 3))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, LINES.value, 16]))
BUSY, BUSY_IF_LIVE = 0.95, 0.8
"""Shares of the multiprocessors' turns that must have a tile: where all rows are live, and where
the device says how many are. Measured on an H200, for weights of 24,576 lines of 4,096."""


@dataclass(frozen=True)
class Tiling:
    """What the kernel is compiled for."""

    depth: int
    outputs: int
    programs: int
    live: bool
    """Whether the device says how many rows there are."""
    source: str = digest(__file__)

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return self.outputs // WIDTH.value


def takes(x: Tensor, weight: Tensor, live: Tensor | None = None) -> bool:
    """Whether the kernel covers types and sizes, and beats cuBLAS. Arguments as of `gated`."""
    rows, depth = x.shape
    across, rest = divmod(len(weight) // 2, WIDTH.value)
    whole = not rest and depth % DEPTH.value == 0 and x.is_contiguous() and weight.is_contiguous()
    if not whole or not x.dtype == weight.dtype == torch.bfloat16:
        return False
    turns = triton.cdiv(rows, HEIGHT.value) * across / multiprocessors(x)
    least = BUSY if live is None else BUSY_IF_LIVE
    return rows > HEIGHT.value and turns >= least * math.ceil(turns)


def gated(x: Tensor, weight: Tensor, live: Tensor | None = None) -> Tensor:
    """silu(gate) * up of the halves of `x @ weight.T`: [rows, len(weight) / 2].

    live: [1] int32, how many of the first rows mean anything; None: all.
    """
    rows, depth = x.shape
    tiling = Tiling(depth, len(weight) // 2, multiprocessors(x), live is not None)
    out = x.new_empty(rows, tiling.outputs)
    halves = ([2, tiling.outputs, depth], [tiling.outputs * depth, depth, 1])
    _wide_gate[(tiling.programs,)](
        _boxes(x, DEPTH.value),
        TensorDescriptor(weight, *halves, [2, WIDTH.value, DEPTH.value], LAYOUT3),
        _boxes(out, WIDTH.value),
        x if live is None else live,
        rows,
        TILING=tiling,
        num_warps=8,
        launch_pdl=True,
    )
    return out


def _boxes(x: Tensor, width: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [HEIGHT.value, width], LAYOUT)


@gluon.jit(do_not_specialize=["rows"])
def _wide_gate(x, weight, out, live, rows, TILING: gl.constexpr):
    inputs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, HEIGHT, DEPTH], LAYOUT)
    lines = gl.allocate_shared_memory(gl.bfloat16, [STAGES, LINES, DEPTH], LAYOUT)
    written = gl.allocate_shared_memory(gl.bfloat16, [HEIGHT, WIDTH], LAYOUT)
    full, free = ring_barriers(STAGES)
    ring = (full, free, inputs, lines)
    gl.warp_specialize(
        [
            (_multiply, (ring, written, out, live, rows, TILING)),
            (_load, (ring, x, weight, live, rows, TILING)),
        ],
        [1],
        [LOADER_REGISTERS],
    )


@gluon.jit
def _load(ring, x, weight, live, rows, TILING: gl.constexpr):
    """Fill slots for all tiles of this program."""
    full, free, inputs, lines = ring
    boxes: gl.constexpr = [STAGES, 2, WIDTH, DEPTH]
    halves = lines._reinterpret(gl.bfloat16, boxes, LAYOUT3)
    steps: gl.constexpr = TILING.depth // DEPTH
    size: gl.constexpr = (HEIGHT + LINES) * DEPTH * 2
    gdc_wait()
    down = _tiles_down(live, rows, TILING)
    done = 0
    for tile in range(gl.program_id(0), down * TILING.across, TILING.programs):
        row, column = tile % down * HEIGHT, tile // down * WIDTH
        for step in range(steps):
            slot = (done + step) % STAGES
            arrival, at = full.index(slot), step * DEPTH
            mbarrier.wait(free.index(slot), ((done + step) // STAGES & 1) ^ 1)
            mbarrier.expect(arrival, size)
            tma.async_copy_global_to_shared(x, [row, at], arrival, inputs.index(slot))
            tma.async_copy_global_to_shared(weight, [0, column, at], arrival, halves.index(slot))
        done += steps


@gluon.jit
def _multiply(ring, written, out, live, rows, TILING: gl.constexpr):
    """Multiply what comes, tile by tile, and write it."""
    full, free, inputs, lines = ring
    steps: gl.constexpr = TILING.depth // DEPTH
    gdc_wait()
    # after the wait, since after a gate everything is settled (`attend_product`)
    gdc_launch_dependents()
    down = _tiles_down(live, rows, TILING)
    done = 0
    for tile in range(gl.program_id(0), down * TILING.across, TILING.programs):
        acc = gl.zeros([HEIGHT, LINES], gl.float32, SUMS)
        for step in range(steps):
            slot = (done + step) % STAGES
            mbarrier.wait(full.index(slot), (done + step) // STAGES & 1)
            columns = lines.index(slot).permute((1, 0))
            acc = warpgroup_mma(inputs.index(slot), columns, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            if step > 0:
                _release(free, done + step - 1)
        done += steps
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _release(free, done - 1)
        # a thread that has a gate also has what it gates
        both = gl.permute(gl.reshape(acc, [HEIGHT, 2, WIDTH]), (0, 2, 1))
        gate, up = gl.split(both.to(gl.bfloat16).to(gl.float32))  # rounded as products elsewhere
        y = gate / (1.0 + gl.exp(-gate)) * up
        tma.store_wait(0)  # the tile before has left shared memory
        meet()
        written.store(y.to(gl.bfloat16))
        fence_async_shared()
        meet()
        place = [tile % down * HEIGHT, tile // down * WIDTH]
        tma.async_copy_shared_to_global(out, place, written)
    tma.store_wait(0)


@gluon.jit
def _release(free, step):
    """All warps have read a step's slot."""
    meet()
    mbarrier.arrive(free.index(step % STAGES), count=1)


@gluon.jit
def _tiles_down(live, rows, TILING: gl.constexpr):
    """How many tiles lie below each other."""
    if TILING.live:
        rows = gl.minimum(rows, gl.load(live))
    return (rows + HEIGHT - 1) // HEIGHT
