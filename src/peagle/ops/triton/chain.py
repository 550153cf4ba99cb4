"""From a layer's attended values to the next layer's q, k, v in one launch, where rows are few.

Four products of few rows take as long as their weights take to read, and between two launches
memory stands idle for some 4 us. Here one program on each multiprocessor goes through all four. One
of its warps loads: it asks for weights as far ahead as a ring in shared memory reaches, into the
next product too, whose input other programs still compute. Four warps multiply what has come.
"""

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

from peagle.ops.residual import Links, Normed
from peagle.ops.triton.launch import HOPPER, counters, multiprocessors, shared_memory
from peagle.ops.triton.tiles import Chain, Ring, tiles_of

meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""The warps of a partition wait for each other."""
PANEL = gl.constexpr(64)
"""Columns of a weight that one copy brings: 128 bytes a row."""
PANELS = gl.constexpr(2)
"""Of 64 rows each, in a slot of the ring."""
SUMS = gl.constexpr(16)
"""Rows of the parts of squares, as `residual` has them."""
STAGGER = gl.constexpr(5)
"""Steps by which a program's way through the depth begins behind its neighbour's: where all read
the same columns of their rows, memory gives 3 % less."""
LEAST_ROWS, MOST_ROWS = 8, 16
REGISTERS = 96
"""Of a thread: with more, attention's programs do not fit beside."""
LOADER_REGISTERS = gl.constexpr(48)
"""Of the loading warp's; the multiplying ones have what is left."""
MARGIN = 2048
"""Bytes of shared memory that are not the ring's."""
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Of panels in shared memory."""


@dataclass(frozen=True)
class Product:
    """One of the four, as its tiles are read.

    A panel has 64 rows: those of 48 outputs; of 32 gates and the 32 numbers they gate; or of 32
    outputs twice, for one piece of the depth and the next, so that few outputs make many tiles.
    """

    kind: str
    """"plain", "gated" or "added"."""
    depth: int
    outputs: int

    @property
    def columns(self) -> int:
        """Outputs of a tile."""
        return 48 if self.kind == "plain" else 32

    @property
    def tiles(self) -> int:
        """One after another, and from program to program."""
        return -(-self.outputs // self.columns)

    @property
    def pieces(self) -> int:
        """Of the depth in one panel."""
        return 2 if self.kind == "added" else 1

    @property
    def steps(self) -> int:
        """Slots that a tile fills."""
        return self.depth // (PANELS.value * PANEL.value * self.pieces)

    def bytes(self, rows: int) -> int:
        """That come into a slot, with so many rows of input."""
        lines = (48 if self.kind == "plain" else 64) + rows * self.pieces
        return int(PANELS.value * PANEL.value * 2 * lines)


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for."""

    rows: int
    """8 or 16."""
    hidden: int
    heads: int
    """Columns of attended values."""
    inner: int
    qkv: int
    """Of the next layer; 0 behind the last."""
    stages: int
    """Slots of the ring."""
    programs: int

    @property
    def out_product(self) -> Product:
        """Of attended values."""
        return Product("added", self.heads, self.hidden)

    @property
    def gate_product(self) -> Product:
        """And up's."""
        return Product("gated", self.hidden, self.inner)

    @property
    def down_product(self) -> Product:
        """The MLP's second."""
        return Product("added", self.inner, self.hidden)

    @property
    def qkv_product(self) -> Product:
        """The next layer's first."""
        return Product("plain", self.hidden, self.qkv)


def takes(attended: Tensor, links: Links) -> bool:
    """Whether one launch beats one a product. Counts what it is asked for."""
    layers = [links.out, links.gate_up, links.down, *([links.qkv] if links.qkv else [])]
    if len(attended) > MOST_ROWS or any(layer.bias is not None for layer in layers):
        return False
    if attended.dtype != torch.bfloat16 or not _is_hopper(attended):
        return False
    asked, step = _asked(attended, links), PANELS.value * PANEL.value
    if asked.heads % (2 * step) or asked.inner % (2 * step) or asked.hidden % step:
        return False
    tiles = tiles_of(attended.device)
    tiles.asked[asked] += 1
    return tiles.get(asked) is not None


def chain(attended: Tensor, stream: Tensor, links: Links) -> tuple[Tensor, Normed, Tensor | None]:
    """As the reference; attended and stream: [rows, width], contiguous."""
    rows = len(stream)
    shape = _shape(attended, links)
    middle, middle_scaled, out, out_scaled = (torch.empty_like(stream) for _ in range(4))
    parts = torch.empty(2, shape.out_product.tiles, SUMS.value, device=stream.device)
    inner = stream.new_empty(rows, shape.inner)
    qkv = stream.new_empty(rows, shape.qkv) if links.qkv else None
    last = (links.qkv or links.out).weight
    weights = (links.out.weight, links.gate_up.weight, links.down.weight, last)
    inputs = (attended, middle_scaled, inner, out_scaled)
    _chain[(shape.programs,)](
        *(_panels(weight, 32) for weight in weights),
        _panels(last, 16),
        *(_panels(x, shape.rows) for x in inputs),
        stream,
        links.post_norm.weight,
        links.next_norm.weight,
        middle,
        middle_scaled,
        parts[0],
        inner,
        out,
        out_scaled,
        parts[1],
        out if qkv is None else qkv,
        counters(stream.device, 4),
        rows,
        links.post_norm.eps,
        links.next_norm.eps,
        SHAPE=shape,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    return out, Normed(out_scaled, parts[1], links.next_norm.eps), qkv


def _is_hopper(x: Tensor) -> bool:
    return torch.cuda.get_device_capability(x.device)[0] == HOPPER


def _asked(attended: Tensor, links: Links) -> Chain:
    return Chain(
        rows=LEAST_ROWS if len(attended) <= LEAST_ROWS else MOST_ROWS,
        hidden=len(links.out.weight),
        heads=attended.shape[1],
        inner=len(links.gate_up.weight) // 2,
        qkv=len(links.qkv.weight) if links.qkv else 0,
    )


def _shape(attended: Tensor, links: Links) -> Shape:
    asked = _asked(attended, links)
    ring = tiles_of(attended.device).get(asked)
    assert isinstance(ring, Ring)
    room = min(ring.room << 10, shared_memory(attended) - MARGIN)
    stages = room // Product("added", 0, 0).bytes(asked.rows)
    return Shape(**vars(asked), stages=stages, programs=multiprocessors(attended))


def _panels(x: Tensor, rows: int) -> TensorDescriptor:
    """How so many rows of a panel are copied; what lies outside of x comes as zeros."""
    return TensorDescriptor.from_tensor(x, [rows, PANEL.value], LAYOUT)


@gluon.jit
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
    stream,
    post_norm,
    next_norm,
    middle,
    middle_scaled,
    middle_squares,
    inner,
    out,
    out_scaled,
    out_squares,
    qkv,
    arrivals,
    rows,
    post_eps,
    next_eps,
    SHAPE: gl.constexpr,
):
    slots: gl.constexpr = SHAPE.stages * PANELS
    most: gl.constexpr = SHAPE.rows
    stages: gl.constexpr = SHAPE.stages
    panels = gl.allocate_shared_memory(gl.bfloat16, [slots, 64, PANEL], LAYOUT)
    halves = panels._reinterpret(gl.bfloat16, [slots * 2, 32, PANEL], LAYOUT)
    quarters = panels._reinterpret(gl.bfloat16, [slots * 4, 16, PANEL], LAYOUT)
    inputs = gl.allocate_shared_memory(gl.bfloat16, [slots * 2, most, PANEL], LAYOUT)
    pairs = inputs._reinterpret(gl.bfloat16, [slots, most * 2, PANEL], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(stages):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    meet()
    weights = (out_weight, gate_up_weight, down_weight, qkv_weight)
    sources = (attended, middle_input, inner_input, out_input)
    added = (stream, post_norm, middle, middle_scaled, middle_squares)
    added_behind = (middle, next_norm, out, out_scaled, out_squares)
    gl.warp_specialize(
        [
            (
                _multiply_all,
                (
                    (full, free, panels, inputs, pairs),
                    added,
                    inner,
                    added_behind,
                    qkv,
                    arrivals,
                    rows,
                    post_eps,
                    next_eps,
                    SHAPE,
                ),
            ),
            (
                _load_all,
                (
                    (full, free, halves, quarters, inputs),
                    weights,
                    qkv_rest,
                    sources,
                    arrivals,
                    SHAPE,
                ),
            ),
        ],
        [1],
        [LOADER_REGISTERS],
    )


@gluon.jit
def _load_all(ring, weights, rest, sources, arrivals, SHAPE: gl.constexpr):
    """What the loading warp does. rest: of weights whose tiles are no power of two high."""
    out: gl.constexpr = SHAPE.out_product
    gate: gl.constexpr = SHAPE.gate_product
    down: gl.constexpr = SHAPE.down_product
    qkv: gl.constexpr = SHAPE.qkv_product
    done = _load(0, ring, weights[0], rest, sources[0], arrivals, 0, out, SHAPE)
    done = _load(done, ring, weights[1], rest, sources[1], arrivals, out.tiles, gate, SHAPE)
    everyone = SHAPE.programs
    done = _load(done, ring, weights[2], rest, sources[2], arrivals + 1, everyone, down, SHAPE)
    if SHAPE.qkv > 0:
        _load(done, ring, weights[3], rest, sources[3], arrivals + 2, down.tiles, qkv, SHAPE)


@gluon.jit
def _load(
    done,
    ring,
    weight,
    rest,
    source,
    arrivals,
    awaited: gl.constexpr,
    PRODUCT: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Fill slots for one product: weights run ahead of inputs, which others may still write.

    done: slots filled before. Returns them with these.
    """
    count = _mine(PRODUCT, SHAPE) * PRODUCT.steps
    ahead = gl.minimum(count, SHAPE.stages)
    for step in range(ahead):
        _load_weight(done + step, step, ring, weight, rest, PRODUCT, SHAPE)
    if awaited == 0:
        gdc_wait()
    elif count > 0:
        _await(arrivals, awaited)
    _publish()
    for step in range(ahead):
        _load_input(done + step, step, ring, source, PRODUCT, SHAPE)
    for step in range(ahead, count):
        _load_weight(done + step, step, ring, weight, rest, PRODUCT, SHAPE)
        _load_input(done + step, step, ring, source, PRODUCT, SHAPE)
    return done + count


@gluon.jit
def _load_weight(place, step, ring, weight, rest, PRODUCT: gl.constexpr, SHAPE: gl.constexpr):
    full, free, halves, quarters, _ = ring
    slot = place % SHAPE.stages
    mbarrier.wait(free.index(slot), (place // SHAPE.stages & 1) ^ 1)
    mbarrier.expect(full.index(slot), PRODUCT.bytes(SHAPE.rows))
    row = (gl.program_id(0) + step // PRODUCT.steps * SHAPE.programs) * PRODUCT.columns
    first = _piece(step, PRODUCT)
    for panel in gl.static_range(PANELS):
        half = (slot * PANELS + panel) * 2
        upper, lower = halves.index(half), halves.index(half + 1)
        if PRODUCT.kind == "added":
            column = (first + panel * 2) * PANEL
            _copy(weight, row, column, full.index(slot), upper)
            _copy(weight, row, column + PANEL, full.index(slot), lower)
        elif PRODUCT.kind == "gated":
            column = (first + panel) * PANEL
            _copy(weight, row, column, full.index(slot), upper)
            _copy(weight, row + PRODUCT.outputs, column, full.index(slot), lower)
        else:
            column = (first + panel) * PANEL
            _copy(weight, row, column, full.index(slot), upper)
            _copy(rest, row + 32, column, full.index(slot), quarters.index(half * 2 + 2))


@gluon.jit
def _load_input(place, step, ring, source, PRODUCT: gl.constexpr, SHAPE: gl.constexpr):
    full, _, _, _, inputs = ring
    pieces: gl.constexpr = PANELS * PRODUCT.pieces
    slot = place % SHAPE.stages
    first = _piece(step, PRODUCT)
    for piece in gl.static_range(pieces):
        panel = inputs.index(slot * PANELS * 2 + piece)
        _copy(source, 0, (first + piece) * PANEL, full.index(slot), panel)


@gluon.jit
def _copy(source, row, column, barrier, panel):
    tma.async_copy_global_to_shared(source, [row, column], barrier, panel)


@gluon.jit
def _piece(step, PRODUCT: gl.constexpr):
    """The first piece of the depth that a step takes."""
    staggered = (step + gl.program_id(0) * STAGGER) % PRODUCT.steps
    return staggered * (PANELS * PRODUCT.pieces)


@gluon.jit
def _mine(PRODUCT: gl.constexpr, SHAPE: gl.constexpr):
    """Tiles that this program takes."""
    return (PRODUCT.tiles - gl.program_id(0) + SHAPE.programs - 1) // SHAPE.programs


@gluon.jit
def _await(arrivals, count: gl.constexpr):
    """Wait until so many have arrived; what they wrote before is then visible."""
    while _seen(arrivals) < count:
        pass


@gluon.jit
def _seen(arrivals):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];",
        "=r,l",
        [arrivals],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _publish():
    """Order common stores before the copies that read them, on both sides."""
    gl.inline_asm_elementwise(
        "{ fence.proxy.async; mov.b32 $0, $1; }",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _arrive(arrivals):
    """Tell that all before is written."""
    _publish()
    meet()
    gl.atomic_add(arrivals, 1, sem="release")


@gluon.jit
def _multiply_all(
    ring,
    added,
    inner,
    added_behind,
    qkv,
    arrivals,
    rows,
    post_eps,
    next_eps,
    SHAPE: gl.constexpr,
):
    """What the multiplying warps do."""
    out_product: gl.constexpr = SHAPE.out_product
    gate_product: gl.constexpr = SHAPE.gate_product
    down_product: gl.constexpr = SHAPE.down_product
    qkv_product: gl.constexpr = SHAPE.qkv_product
    gdc_wait()
    # attention that is launched now may read all but q, k and v, for which it waits
    gdc_launch_dependents()
    done = _add(0, ring, added, arrivals, rows, out_product, SHAPE)
    _await(arrivals, out_product.tiles)
    factor = _over_rms(added[4], post_eps, out_product, SHAPE)
    done = _gate(done, ring, factor, inner, rows, gate_product, SHAPE)
    _arrive(arrivals + 1)
    done = _add(done, ring, added_behind, arrivals + 2, rows, down_product, SHAPE)
    if SHAPE.qkv > 0:
        _await(arrivals + 2, down_product.tiles)
        factor = _over_rms(added_behind[4], next_eps, down_product, SHAPE)
        _scale(done, ring, factor, qkv, rows, qkv_product, SHAPE)
    if gl.atomic_add(arrivals + 3, 1, sem="relaxed") == SHAPE.programs - 1:
        for count in gl.static_range(4):
            gl.store(arrivals + count, 0)


@gluon.jit
def _multiply(done, ring, PRODUCT: gl.constexpr, SHAPE: gl.constexpr):
    """A tile: [64, rows], or [64, 2 rows] where halves of panels are pieces of the depth."""
    full, free, panels, inputs, pairs = ring
    width: gl.constexpr = SHAPE.rows * PRODUCT.pieces
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    acc = gl.zeros([64, width], gl.float32, acc_layout)
    for step in range(PRODUCT.steps):
        slot = (done + step) % SHAPE.stages
        mbarrier.wait(full.index(slot), (done + step) // SHAPE.stages & 1)
        for panel in gl.static_range(PANELS):
            at = slot * PANELS + panel
            x = pairs.index(at) if PRODUCT.pieces == 2 else inputs.index(at * 2 - panel)
            acc = warpgroup_mma(panels.index(at), x.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(slot), count=1)
    return acc


@gluon.jit
def _add(done, ring, added, arrivals, rows, PRODUCT: gl.constexpr, SHAPE: gl.constexpr):
    """The product and the stream before, that under the next norm, and the sum of its squares."""
    before, norm, out, scaled, squares = added
    most: gl.constexpr = SHAPE.rows
    quarters_layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 2], [32, 1, 1, 1], [1, 4, 1, 1], [2, 3, 0, 1]
    )
    tile_layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, quarters_layout))
    row = gl.arange(0, most, gl.SliceLayout(0, tile_layout))
    for index in range(_mine(PRODUCT, SHAPE)):
        tile = gl.program_id(0) + index * SHAPE.programs
        column = tile * 32 + gl.arange(0, 32, gl.SliceLayout(1, tile_layout))
        inside = column < PRODUCT.outputs
        place = row[None, :] * PRODUCT.outputs + column[:, None]
        keep = (row < rows)[None, :] & inside[:, None]
        known = gl.load(before + place, mask=keep, other=0.0, cache_modifier=".cg")
        factor = gl.load(norm + column, mask=inside, other=0.0).to(gl.float32)
        acc = _multiply(done + index * PRODUCT.steps, ring, PRODUCT, SHAPE)
        # each half of a panel by its own piece of the input is the diagonal
        quarters = gl.permute(gl.reshape(acc, [2, 32, 2, most]), (1, 3, 0, 2))
        left, right = gl.split(gl.convert_layout(quarters, quarters_layout))
        first, _ = gl.split(left)
        _, second = gl.split(right)
        y = (first + second).to(gl.bfloat16).to(gl.float32) + known.to(gl.float32)
        y = y.to(gl.bfloat16)
        gl.store(out + place, y, mask=keep)
        y = y.to(gl.float32)
        gl.store(scaled + place, (y * factor[:, None]).to(gl.bfloat16), mask=keep)
        gl.store(squares + tile * SUMS + row, gl.sum(gl.where(keep, y * y, 0.0), 0))
        _arrive(arrivals)
    return done + _mine(PRODUCT, SHAPE) * PRODUCT.steps


@gluon.jit
def _over_rms(squares, eps, PRODUCT: gl.constexpr, SHAPE: gl.constexpr):
    """One over the root mean square of each row of a stream: [1, rows]."""
    meet()
    most: gl.constexpr = SHAPE.rows
    parts: gl.constexpr = triton.next_power_of_2(PRODUCT.tiles)
    read_layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // most, most], [4, 1], [1, 0])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, most, 16])
    part = gl.arange(0, parts, gl.SliceLayout(1, read_layout))
    row = gl.arange(0, most, gl.SliceLayout(0, read_layout))
    there = (part < PRODUCT.tiles)[:, None] & (row >= 0)[None, :]
    at = squares + part[:, None] * SUMS + row[None, :]
    found = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
    factor = gl.rsqrt(gl.sum(found, 0) / PRODUCT.outputs + eps)
    return gl.convert_layout(factor, gl.SliceLayout(0, acc_layout))[None, :]


@gluon.jit
def _gate(done, ring, factor, inner, rows, PRODUCT: gl.constexpr, SHAPE: gl.constexpr):
    """silu(gate) * up."""
    most: gl.constexpr = SHAPE.rows
    pair_layout: gl.constexpr = gl.BlockedLayout([2, 1, 2], [16, 2, 1], [1, 4, 1], [2, 0, 1])
    tile_layout: gl.constexpr = gl.SliceLayout(2, pair_layout)
    row = gl.arange(0, most, gl.SliceLayout(0, tile_layout))
    for index in range(_mine(PRODUCT, SHAPE)):
        tile = gl.program_id(0) + index * SHAPE.programs
        acc = _multiply(done + index * PRODUCT.steps, ring, PRODUCT, SHAPE) * factor
        both = gl.permute(gl.reshape(acc, [2, 32, most]), (1, 2, 0))
        gate, up = gl.split(gl.convert_layout(both, pair_layout))
        y = gate / (1.0 + gl.exp(-gate)) * up
        column = tile * 32 + gl.arange(0, 32, gl.SliceLayout(1, tile_layout))
        keep = (row < rows)[None, :] & (column < PRODUCT.outputs)[:, None]
        place = row[None, :] * PRODUCT.outputs + column[:, None]
        gl.store(inner + place, y.to(gl.bfloat16), mask=keep)
    return done + _mine(PRODUCT, SHAPE) * PRODUCT.steps


@gluon.jit
def _scale(done, ring, factor, out, rows, PRODUCT: gl.constexpr, SHAPE: gl.constexpr):
    """The product, and nothing with it."""
    tile_layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    most: gl.constexpr = SHAPE.rows
    row = gl.arange(0, most, gl.SliceLayout(0, tile_layout))
    output = gl.arange(0, 64, gl.SliceLayout(1, tile_layout))
    for index in range(_mine(PRODUCT, SHAPE)):
        tile = gl.program_id(0) + index * SHAPE.programs
        acc = _multiply(done + index * PRODUCT.steps, ring, PRODUCT, SHAPE) * factor
        column = tile * PRODUCT.columns + output
        inside = (output < PRODUCT.columns) & (column < PRODUCT.outputs)
        keep = (row < rows)[None, :] & inside[:, None]
        y = gl.convert_layout(acc, tile_layout).to(gl.bfloat16)
        gl.store(out + row[None, :] * PRODUCT.outputs + column[:, None], y, mask=keep)
