"""Products with weights of any format, with what is around them in the same launch.

The weight is the left operand, so that a tile is [lines, rows]: a tensor core's instruction wants
16 or 64 lines of its left operand and as few as 8 of its right one, and the left one may come from
registers, where the numbers are widened (`weights`). How the depth is divided follows from the
weight alone, so that a row's result is the same to the last bit among any number of rows; only
weights of four bits are divided in two ways, for few rows and for more. On Hopper `hopper_product`
takes more rows of packed weights, and up to eight of four bits, and adds up otherwise. A tile of
gates has as many lines of what they gate behind them.

With `batch_invariant` four bits are divided in one way, and tensors like other weights. Where
rows are many, a program takes all parts of a tensor's depth one after the other, and adds them up
in the same order. How other products of tensors are divided `tiles` says.
"""

import functools
import math
import warnings
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton import on_hopper
from peagle.ops.triton.launch import (
    announce,
    multiprocessors,
    overlap,
    prefetch,
    shared_memory,
    wait,
)
from peagle.ops.triton.product_call import ProductCall, gathered, left, over_rms
from peagle.ops.triton.swiglu import gated
from peagle.ops.triton.tiles import padded, tile_of
from peagle.ops.triton.weights import Packing, bits_of, factored, operands, sums, words
from peagle.ops.weight import FP8, QuantizedWeight, Weight

LINES, DEPTH = 64, 128
"""Lines of the weight, and their depth, that a program reads in a step."""
STEP_BYTES = 256
"""Most bytes of a tensor's line in a step."""
FOUR_BITS_DEPTH = 256
"""Inputs of a step of four bits each where rows are as few as fill a tile: more rows take the room
of other programs, and registers, so that products wait for each other."""
LEAST_DEPTH = 1024
"""The least depth of the weight for a program whose tile is shared."""
RESIDENT, RESIDENT_FOUR_BITS = 3, 6
"""Programs of a multiprocessor that share the tiles of a product with few tiles; more where weights
have four bits and rows are few, since each program waits for its products, not for memory."""
EVEN, TRIED = 0.85, 3
"""Least programs of a multiprocessor on average, of the most that one has, and how many numbers of
programs that share a tile are tried for it."""
TOGETHER = 4
"""Most programs for which a multiprocessor has room at a time."""
STAGES = 3, 8
"""Fewest and most steps of the depth that are copied or multiplied at once."""
EXCHANGED = 36 << 10
"""Bytes of shared memory that threads of the largest program pass widened numbers and sums through,
beside the steps."""
CONVERTS_E4M3 = (8, 9)
"""The first compute capability that converts E4M3."""
AHEAD = tl.constexpr(4)
"""Steps of which a program asks for the weight while the kernel before it still ends."""
MOST_ROWS = 128
"""Most rows of a program; more are divided among programs."""


@dataclass(frozen=True)
class Division:
    """How a product is divided among programs."""

    lines: int
    """Lines of the weight that a program has."""
    step: int
    """Inputs that a program reads at a time."""
    height: int
    """Rows that a program has."""
    splits: int
    """Parts of the depth."""
    apart: bool
    """Whether one program has all parts of the depth, one after the other."""
    stages: int
    warps: int = 4
    overlaps: bool = True

    def grid(self, lines: int, rows: int) -> tuple[int, int, int]:
        """Programs by lines, rows and depth."""
        across = triton.cdiv(rows, self.height)
        return triton.cdiv(lines, self.lines), across, 1 if self.apart else self.splits


def takes(weight: QuantizedWeight, device: torch.device) -> bool:
    """Whether the kernel covers a weight's blocks, and the GPU has its instructions."""
    if weight.format.bits == 4:
        return True
    wide, depth, run = weight.block[1], weight.shape[-1], weight.run
    if depth % run or not (wide >= depth or wide % run == 0) or weight.zeros is not None:
        return False
    return weight.format != FP8 or able(device)


@functools.cache
def able(device: torch.device) -> bool:
    """Whether a GPU converts E4M3; warns once where it does not."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= CONVERTS_E4M3:
        return True
    name = torch.cuda.get_device_name(device)
    warnings.warn(f"{name} has no FP8 instructions: FP8 weights are slow on it", stacklevel=2)
    return False


def step_of(weight: Weight, most: int) -> int:
    """Inputs of a step of the depth, at most so many, all of one block where sums are scaled."""
    if isinstance(weight, Tensor):
        return min(most, STEP_BYTES // weight.element_size())
    wide = weight.block[1]
    return most if weight.format.bits == 4 or wide >= weight.shape[-1] else math.gcd(most, wide)


def splits_of(lines: int, depth: int, programs: int, processors: int, step: int = DEPTH) -> int:
    """How many programs share a tile, each with a part of the depth, where so many run at once.

    Where tiles are shared, each program has at least a thousand inputs, and some more programs
    share one if multiprocessors would have too unlike numbers of them.
    """
    tiles, steps, most = triton.cdiv(lines, LINES), triton.cdiv(depth, step), depth // LEAST_DEPTH
    fewest = max(min(programs // tiles, most), 1)
    past = min(fewest + TRIED, most + 1, max(programs, TOGETHER * processors) // tiles + 1)
    tried = range(fewest, past) if fewest > 1 else (1,)
    found = [triton.cdiv(steps, triton.cdiv(steps, wanted)) for wanted in tried]
    return next((splits for splits in found if _even(splits * tiles, processors)), found[0])


def _even(programs: int, processors: int) -> bool:
    return programs >= EVEN * processors * triton.cdiv(programs, processors)


def room_of(x: Tensor, numbers: int, bits: int) -> int:
    """Bytes of shared memory for steps on their way to a program that multiplies rows like x.

    numbers: of the weight, in a step, of so many bits. Widened ones pass through shared memory once
    more in float32, which tensor cores do not multiply, and those of four bits on all but Hopper's
    tensor cores: that much is not left for steps.
    """
    widened = 4 if x.dtype == torch.float32 else 2 if bits == 4 and not on_hopper(x) else 0
    return shared_memory(x) - numbers * widened


def stages_that_fit(stages: int, step_bytes: int, room: int) -> int:
    """At most so many stages as there is room for; the one that is multiplied takes no room."""
    return max(min(stages, room // step_bytes + 1), 2)


def stages_for(programs: int, step_bytes: int, room: int, processors: int) -> int:
    """Steps of the depth that are copied or multiplied at once: as many as programs have room.

    room: of one program that has a multiprocessor, of so many, for itself.
    """
    together = min(triton.cdiv(programs, processors), TOGETHER)
    fewest, most = STAGES
    most = min(most, (room - EXCHANGED) // step_bytes)
    wanted = min(max(room // together // step_bytes, fewest), most)
    return stages_that_fit(wanted, step_bytes, room)


def height_for(rows: int, step: int, x: Tensor, bits: int = 8) -> int:
    """Rows of a program: no more than it has room for."""
    height, room = min(padded(rows), MOST_ROWS), room_of(x, LINES * step, bits)
    while step_bytes(height, step, x, bits) > room:
        height //= 2
    return height


def step_bytes(height: int, step: int, x: Tensor, bits: int = 8) -> int:
    """Bytes of a step of the depth, of a weight of so many bits and of so many rows like x."""
    return step * (LINES * bits // 8 + height * x.element_size())


def division_of(call: ProductCall) -> Division:
    """How a call is divided: by its weight alone, but for few rows of a tensor or of four bits."""
    x, weight, (rows, depth) = call.x, call.weight, call.x.shape
    if isinstance(weight, Tensor) and not call.fixed:
        gates = call.epilogue.gates
        tile = tile_of(x, call.out.shape[1], gates)
        lines = tile.columns * (1 + gates)
        how = tile.stages, tile.warps, tile.overlaps
        return Division(lines, tile.depth, padded(rows), tile.splits, False, *how)
    bits = bits_of(weight)
    few = bits == 4 and not call.fixed and padded(rows) == padded(1)
    step = step_of(weight, FOUR_BITS_DEPTH if few else DEPTH)
    processors, height = multiprocessors(x), height_for(rows, step, x, bits)
    resident = RESIDENT_FOUR_BITS if few else RESIDENT
    sizes = len(weight), depth
    splits = splits_of(*sizes, resident * processors, processors, max(step, DEPTH))
    apart = rows > height and isinstance(weight, Tensor)
    given = Division(LINES, step, height, splits, apart, 0)
    room, bytes_of_step = room_of(x, LINES * step, bits), step_bytes(height, step, x, bits)
    programs = math.prod(given.grid(len(weight), rows))
    return replace(given, stages=stages_for(programs, bytes_of_step, room, processors))


def launch(call: ProductCall) -> Tensor:
    """Fill a call's results, of which the first is returned."""
    x, weight, rows = call.x, call.weight, len(call.x)
    given = division_of(call)
    tiles, across, together = grid = given.grid(len(weight), rows)
    sums = math.prod(grid) * given.lines * given.height if together > 1 else 0
    _product[grid](
        x,
        call.squares,
        operands(weight),
        call.bias,
        call.results(tiles * across, sums),
        rows,
        call.sizes,
        W=Packing.of(weight, given.step),
        ROWS=given.height,
        LINES=given.lines,
        F=call.form(given.splits, given.apart),
        **overlap(x, given.overlaps),
        num_warps=given.warps,
        num_stages=given.stages,
    )
    return call.out


@triton.jit
def gate_lines(tile, outputs, LINES: tl.constexpr):
    """The lines of a tile: some gates', and as many of what they gate."""
    place = tl.arange(0, LINES)
    column = tl.minimum(tile * (LINES // 2) + place % (LINES // 2), outputs - 1)
    return column.to(tl.int64) + place // (LINES // 2) * outputs


@triton.jit
def halves(tile):
    """The first and the last half of a tile's lines [lines, rows]."""
    return tile.reshape(2, tile.shape[0] // 2, tile.shape[1]).permute(1, 2, 0).split()


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    squares,
    weight,
    bias,
    results,
    rows,
    sizes,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    F: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    announce(OVERLAP)
    outputs, depth = sizes.outputs, sizes.depth
    tile, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    columns: tl.constexpr = LINES // (1 + F.gated)
    column = tile * columns + tl.arange(0, columns)
    inside = column < outputs
    if F.gated:
        line = gate_lines(tile, outputs, LINES)
    else:
        # past the last line that one again: loads need no mask
        line = tl.minimum(column, outputs - 1).to(tl.int64)
    x_at = x + row.to(tl.int64) * depth
    share = tl.cdiv(tl.cdiv(depth, W.step), F.splits) * W.step
    first = split * share
    past = depth if F.apart else tl.minimum(first + share, depth)
    if OVERLAP:
        # a weight is nobody's result: what is read of it does not wait for the launch before
        ahead = tl.minimum(first + tl.arange(0, AHEAD) * W.step, tl.maximum(past - W.step, 0))
        ahead = ahead[None, :] // W.together
        prefetch(weight.numbers + line[:, None] * words(depth, W) + ahead)
    wait(OVERLAP)
    if F.apart:
        total = tl.zeros([LINES, ROWS], tl.float32)
        # in the order in which `gathered` adds programs' sums, so that the bits are the same
        for part in range(F.splits):
            past = tl.minimum((part + 1) * share, depth)
            # several programs read these lines: L2 keeps them
            total += sums(x_at, real, weight, line, part * share, past, depth, W, "")
    else:
        # nobody reads these lines again in this pass
        total = sums(x_at, real, weight, line, first, past, depth, W, "evict_first")
    if F.splits > 1 and not F.apart:
        place = tl.arange(0, LINES)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        own = tl.program_id(1) * tl.num_programs(0) + tile
        at = results.partial + own * (F.splits * LINES * ROWS) + place
        if not left(total, at, split, results.arrivals, own, F.splits):
            return
        total = gathered(at, results.arrivals, own, F.splits)
    total = factored(total, weight.factors, line, W)
    if squares is not None:
        total = total * over_rms(squares, sizes, row, real, depth, F.parts)[None, :]
    kind = results.out.dtype.element_ty
    if F.gated:
        # rounded as a product is that is written before its gate is taken
        gate, up = halves(total.to(kind).to(tl.float32))
        total = gated(gate, up, F.gelu)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)[None, :] * outputs + column[:, None]
    keep = real[None, :] & inside[:, None]
    if F.adds:
        # rounded as a product is that is written before the stream is added
        total = total.to(kind).to(tl.float32)
        total += tl.load(results.stream + place, mask=keep, other=0.0).to(tl.float32)
    y = total.to(kind)
    tl.store(results.out + place, y, mask=keep)
    if F.adds:
        # the norm sees what is written, not what was rounded away
        stored = tl.where(keep, y.to(tl.float32), 0.0)
        factor = tl.load(results.norm + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(results.scaled + place, (stored * factor[:, None]).to(kind), mask=keep)
        tl.store(results.squares + tile * ROWS + tl.arange(0, ROWS), tl.sum(stored * stored, 0))
