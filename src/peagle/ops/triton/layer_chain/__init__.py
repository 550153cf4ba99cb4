"""From a layer's attended values to the next layer's q, k, v in one launch, where rows are few.

Products of few rows take as long as reading their weights, and between two launches memory is idle
for some 4 us. Here one program on each multiprocessor goes through all four products. One of its
warps loads: it requests weights as far ahead as a ring in shared memory reaches, also those of the
next product, whose input other programs still compute. Four warps multiply what has arrived.

    product        input                        its programs wait for
    out            attended values              the launch before
    gate and up    stream + out, normed         all parts of `out`
    down           silu(gate) * up              all programs' parts of gate and up
    q, k, v        stream + down, normed        all parts of `down`

    one program    loading warp  │ W out │ W gate, up │ W down │ W qkv │  ahead, as far as the ring
                   four warps      │ out ·│ gate, up ····│ down ·│ qkv │  behind, when inputs come

The programs wait for each other, so all must be on the GPU at once. Within one stream they are,
since whatever ran before ends; programs of another process, under MPS, might not.
"""

import functools
import os
from dataclasses import replace
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Epilogue
from peagle.ops.residual import BlockWeights
from peagle.ops.triton.fences import fence
from peagle.ops.triton.gluon import ring_barriers
from peagle.ops.triton.launch import counters, multiprocessors, shared_memory
from peagle.ops.triton.layer_chain.loads import load_all
from peagle.ops.triton.layer_chain.products import Added, multiply_all
from peagle.ops.triton.layer_chain.shape import (
    HEIGHT,
    LAYOUT,
    LAYOUT3,
    LAYOUT4,
    LEAST_ROWS,
    MOST_ROWS,
    OWNED,
    PANEL,
    ChainSizes,
    Link,
)
from peagle.ops.weight import dense, format_of

REGISTERS = {8: 64, 16: 64, 32: 96, 64: 168}
"""Registers of a thread, by rows."""
LOADER_REGISTERS = gl.constexpr(48)
"""Registers of the loading warp's threads; the multiplying warps share the rest."""
ROOM = 208 << 10
"""Bytes of shared memory for the ring, where a program may have as many."""
MARGIN = 10 << 10
"""Bytes of shared memory that the ring leaves to other things."""


def takes(attended: Tensor, block: BlockWeights) -> bool:
    """Whether one launch beats one for each product."""
    named = (block.out, block.gate_up, block.down, block.qkv)
    layers = [layer for layer in named if layer is not None]
    # from 33 rows on tiles are cut otherwise (`ChainSizes.alike`), and so are their sums
    if block.out.batch_invariant or not 0 < len(attended) <= MOST_ROWS or is_shared():
        return False
    if block.gate is not Epilogue.GATE:
        return False
    if any(format_of(x) != "bfloat16" for x in (attended, *(layer.weight for layer in layers))):
        return False
    if any(layer.bias is not None for layer in layers):
        return False
    # a link has whole steps alone: `Link.steps` would leave a rest out
    links = _shape(attended, block).links
    return not any(link.depth % (link.chunk * link.programs) for link in links)


def layer_chain(
    attended: Tensor, stream: Tensor, block: BlockWeights
) -> tuple[Tensor, Normed, Tensor | None]:
    """As the reference; attended and stream: [rows, width], contiguous."""
    rows = len(stream)
    shape = _shape(attended, block)
    middle, middle_scaled, out, out_scaled = (torch.empty_like(stream) for _ in range(4))
    parts = (2, shape.out_link.units, shape.squares_stride)
    squares = torch.empty(parts, dtype=torch.float32, device=stream.device)
    inner = stream.new_empty(rows, shape.inner)
    given = (shape.given, shape.rows, OWNED.value)
    sums = torch.empty(given, dtype=torch.float32, device=stream.device)
    qkv = None if block.qkv is None else stream.new_empty(rows, shape.qkv)
    last = (block.out if block.qkv is None else block.qkv).weight
    named = (block.out.weight, block.gate_up.weight, block.down.weight, last)
    weights = [*map(dense, named)]
    inputs = (attended, middle_scaled, inner, out_scaled)
    pieces = [link.inputs for link in shape.links]
    post, following = block.post_norm, block.next_norm
    # the kernel announces after its wait
    fence()
    _chain[(shape.programs,)](
        *(_weights(*pair) for pair in zip(weights, shape.links, strict=True)),
        _boxes(weights[-1], (1, 16, PANEL.value)),
        *(_boxes(x, (n, shape.rows, PANEL.value)) for x, n in zip(inputs, pieces, strict=True)),
        Added(stream, post.weight, post.eps, middle, middle_scaled, squares[0]),
        inner,
        Added(middle, following.weight, following.eps, out, out_scaled, squares[1]),
        out if qkv is None else qkv,
        sums,
        # who has arrived with out, gate and up, down, and at the end; then a count for each half of
        # a tile that is exchanged
        counters(stream.device, 4 + shape.given),
        rows,
        SHAPE=shape,
        num_warps=4,
        maxnreg=REGISTERS[shape.rows],
        launch_pdl=True,
    )
    return out, Normed(out_scaled, squares[1], following.eps), qkv


@functools.cache
def is_shared() -> bool:
    """Whether other processes run on the GPU at the same time: where MPS has its pipes."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).exists()


def _shape(attended: Tensor, block: BlockWeights) -> ChainSizes:
    sizes = ChainSizes(
        rows=max(LEAST_ROWS, triton.next_power_of_2(len(attended))),
        hidden=len(block.out.weight),
        heads=attended.shape[1],
        inner=len(block.gate_up.weight) // 2,
        qkv=0 if block.qkv is None else len(block.qkv.weight),
        programs=multiprocessors(attended),
    )
    room = min(ROOM, shared_memory(attended) - MARGIN)
    return replace(sizes, stages=room // sizes.slot)


def _weights(weight: Tensor, link: Link) -> TensorDescriptor:
    """How a link's weights are copied to shared memory."""
    if link.kind != "gated":
        return _boxes(weight, link.box)
    # gates lie `outputs` lines before what they gate, yet one copy brings both:
    #
    #                     a panel wide           in shared memory, a panel
    #   weight   gate 0   [ 64 columns ] ...     gate 0 to 31
    #            ...                             up 0 to 31, its lower half
    #            up 0     [ 64 columns ] ...
    depth = weight.shape[1]
    shape = [depth // PANEL.value, 2, link.outputs, PANEL.value]
    strides = [PANEL.value, link.outputs * depth, depth, 1]
    return TensorDescriptor(weight, shape, strides, list(link.box), LAYOUT4)


def _boxes(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """How boxes of panels by lines are copied; outside of x there are zeros."""
    lines, depth = x.shape
    shape, strides = [depth // PANEL.value, lines, PANEL.value], [PANEL.value, depth, 1]
    return TensorDescriptor(x, shape, strides, list(box), LAYOUT3)


@gluon.jit(do_not_specialize=["rows"])
def _chain(
    out_weight,
    gate_up_weight,
    down_weight,
    qkv_weight,
    qkv_rest,
    attended,
    middle_input,
    inner_input,
    out_input,
    added,
    inner,
    added_behind,
    qkv,
    sums,
    arrivals,
    rows,
    SHAPE: gl.constexpr,
):
    places: gl.constexpr = SHAPE.stages * SHAPE.panels
    pieces: gl.constexpr = SHAPE.stages * SHAPE.pieces
    most: gl.constexpr = SHAPE.rows
    panels = gl.allocate_shared_memory(gl.bfloat16, [places, HEIGHT, PANEL], LAYOUT)
    # input is as large as weights then: a slot gives each as many of its places as a link needs
    if SHAPE.alike:
        inputs = panels
    else:
        inputs = gl.allocate_shared_memory(gl.bfloat16, [pieces, most, PANEL], LAYOUT)
    # two pieces of input one below the other, which a folded panel is multiplied by
    folded = inputs._reinterpret(gl.bfloat16, [pieces // 2, most * 2, PANEL], LAYOUT)
    full, free = ring_barriers(SHAPE.stages)
    weights = (out_weight, gate_up_weight, down_weight, qkv_weight)
    sources = (attended, middle_input, inner_input, out_input)
    gl.warp_specialize(
        [
            (
                multiply_all,
                (
                    (full, free, panels, inputs, folded),
                    added,
                    inner,
                    added_behind,
                    qkv,
                    (sums, arrivals + 4),
                    arrivals,
                    rows,
                    SHAPE,
                ),
            ),
            (load_all, ((full, free, panels, inputs), weights, qkv_rest, sources, arrivals, SHAPE)),
        ],
        [1],
        [LOADER_REGISTERS],
    )
