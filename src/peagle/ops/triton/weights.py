"""Sums of a weight's products for any kernel; packed numbers are widened in registers.

16 bits have two numbers of eight bits or four of four, of inputs that are a half or a quarter of a
run apart: a step of the depth is as many products as 16 bits have numbers. Scales of eight bits and
of integers multiply float32 sums of one block each; those of E2M1 multiply its numbers. An output's
factor and what follows are left to the kernel.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton.widening import (
    e2m1,
    e4m3,
    integers4,
    integers8,
    powers,
    scales_e4m3,
    unshifted,
)
from peagle.ops.weight import E4M3, Weight


@dataclass(frozen=True)
class Packing:
    """What a kernel is compiled with for a weight, beside its sizes."""

    kind: str
    """The name of the format, "dense" for tensors."""
    run: int
    high: int
    wide: int
    """Inputs that share a scale; `high` outputs do."""
    columns: int
    """Scales that are kept for an output."""
    zeros: bool
    factors: bool
    divided: bool
    together: int
    """Numbers in 16 bits, or 1 of a tensor."""

    @classmethod
    def of(cls, weight: Weight) -> "Packing":
        """The packing of a weight."""
        if isinstance(weight, Tensor):
            return cls("dense", 1, 1, 1, 1, False, False, False, 1)
        zeros, factors = weight.zeros is not None, weight.factors is not None
        name, columns = weight.format.name, weight.scales.shape[-1]
        has = zeros, factors, weight.divided
        return cls(name, weight.run, *weight.block, columns, *has, 16 // weight.format.bits)


class Operands(NamedTuple):
    """A weight as kernels read it; anything in place of what it lacks."""

    numbers: Tensor
    """[..., outputs, words] int16, or a tensor's numbers"""
    scales: Tensor
    zeros: Tensor
    factors: Tensor


def bits_of(weight: Weight) -> int:
    """The bits of a weight's number."""
    return 8 * weight.element_size() if isinstance(weight, Tensor) else weight.format.bits


def operands(weight: Weight) -> Operands:
    """The operands of a weight."""
    if isinstance(weight, Tensor):
        return Operands(weight, weight, weight, weight)
    scales = weight.scales
    if scales.dtype == E4M3:
        scales = scales.view(torch.uint8)
    own = (scales if given is None else given for given in (weight.zeros, weight.factors))
    return Operands(weight.numbers.view(torch.int16), scales, *own)


@triton.jit
def words(depth, W: tl.constexpr):
    """How many words of 16 bits an output has; in a tensor, how many numbers."""
    if W.together <= 2:  # whole runs
        return depth // W.together
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        return (depth + W.run - 1) // W.run * (W.run // 4)


@triton.jit
def first_inputs(W: tl.constexpr, STEP: tl.constexpr):
    """For each 16 bits of a step, the input by which their first number is multiplied."""
    # which inputs the numbers of 16 bits belong to, in the order of the numbers
    #
    #   eight bits, run of 128     0 64 │ 1 65 │ 2 66 │ ... │ 63 127 │ 128 192 │ ...
    #   FP4, run of 64             0 16 32 48 │ 1 17 33 49 │ ... │ 15 31 47 63 │ 64 80 ...
    #   int4, run of 128           0 32 64 96 │ 1 33 65 97 │ ... │ 31 63 95 127 │ 128 160 ...
    #
    # so first numbers of neighbouring words belong to neighbouring inputs, as second ones do
    apart: tl.constexpr = W.run // W.together
    place = tl.arange(0, STEP // W.together)
    return place // apart * W.run + place % apart


@triton.jit
def sums(x_at, real, weight, line, first, past, depth, W: tl.constexpr, EVICTION: tl.constexpr):
    """Lines of the weight times rows, over a range of the depth: [lines, rows].

    x_at: [`first_inputs`, rows] at a depth of 0; real: rows that are there; first: a multiple of a
    step, and so is past unless the depth ends there.
    """
    if W.kind == "dense":
        return _dense(x_at, real, weight, line, first, past, depth, EVICTION)
    elif W.together == 2:  # noqa: RET505 (as above)
        return _eight_bits(x_at, real, weight, line, first, past, depth, W, EVICTION)
    elif W.kind == "int4":
        return _integers(x_at, real, weight, line, first, past, depth, W, EVICTION)
    else:
        return _fp4(x_at, real, weight, line, first, past, depth, W, EVICTION)


@triton.jit
def _dense(x_at, real, weight, line, first, past, depth, EVICTION: tl.constexpr):
    step: tl.constexpr = x_at.shape[0]
    place = tl.arange(0, step)
    numbers_at = weight.numbers + line[:, None] * depth + place[None, :]
    total = tl.zeros([line.shape[0], x_at.shape[1]], tl.float32)
    for k in range(first, past, step):
        inside = place < past - k
        found = tl.load(numbers_at + k, mask=inside[None, :], other=0.0, eviction_policy=EVICTION)
        a = tl.load(x_at + k, mask=inside[:, None] & real[None, :], other=0.0)
        total = tl.dot(found, a, total, input_precision="ieee")
    return total


@triton.jit
def _eight_bits(
    x_at, real, weight, line, first, past, depth, W: tl.constexpr, EVICTION: tl.constexpr
):
    kind: tl.constexpr = x_at.dtype.element_ty
    step: tl.constexpr = x_at.shape[0] * 2
    place = tl.arange(0, step // 2)
    numbers_at = weight.numbers + line[:, None] * (depth // 2) + place[None, :]
    scales_at = weight.scales + (line // W.high) * W.columns
    total = tl.zeros([line.shape[0], x_at.shape[1]], tl.float32)
    scale = tl.load(scales_at + first // W.wide)
    for k in range(first, past, step):
        # a step ahead: unlike the rest it is not copied to shared memory beforehand
        coming = tl.load(scales_at + tl.minimum(k + step, past - 1) // W.wide)
        inside = place < (past - k) // 2
        found = tl.load(
            numbers_at + k // 2, mask=inside[None, :], other=0, eviction_policy=EVICTION
        )
        mask = inside[:, None] & real[None, :]
        a = tl.load(x_at + k, mask=mask, other=0.0)
        b = tl.load(x_at + k + W.run // 2, mask=mask, other=0.0)
        if W.kind == "fp8":
            lower, upper = e4m3(found, kind)
        else:
            lower, upper = integers8(found, kind)
        part = tl.dot(lower, a, input_precision="ieee")
        part = tl.dot(upper, b, part, input_precision="ieee")
        total += part * scale[:, None].to(tl.float32)
        scale = coming
    return total


@triton.jit
def _fp4(x_at, real, weight, line, first, past, depth, W: tl.constexpr, EVICTION: tl.constexpr):
    kind: tl.constexpr = x_at.dtype.element_ty
    step: tl.constexpr = x_at.shape[0] * 4
    lines: tl.constexpr = line.shape[0]
    total = tl.zeros([lines, x_at.shape[1]], tl.float32)
    place, block = tl.arange(0, step // 4), tl.arange(0, step // W.wide)
    at, width = place // 16 * W.run, words(past, W)
    numbers_at = weight.numbers + line[:, None] * words(depth, W) + place[None, :]
    scales_at = weight.scales + line[:, None] * W.columns + block[None, :]
    for k in range(first, past, step):
        inside = (place < width - k // 4)[None, :]
        found = tl.load(numbers_at + k // 4, mask=inside, other=0, eviction_policy=EVICTION)
        # scales are padded to whole steps (`FP4.columns`): no mask
        scale = tl.load(scales_at + k // W.wide)
        if W.wide == 32:
            one, three = powers(scale, kind).reshape(lines, step // 64, 2).split()
            two, four = one, three
        else:
            even, odd = scales_e4m3(scale, kind).reshape(lines, step // 64, 2, 2).split()
            one, three = even.split()
            two, four = odd.split()
        repeated = _repeated(one), _repeated(two), _repeated(three), _repeated(four)
        quarters = e2m1(found, repeated, kind)
        for quarter in tl.static_range(4):
            # the depth ends with a block: the two quarters of one of 32 inputs end together
            if quarter % 2 == 0 or W.wide == 16:
                inside = (at + 16 * quarter < past - k)[:, None] & real[None, :]
            a = tl.load(x_at + k + 16 * quarter, mask=inside, other=0.0)
            total = tl.dot(quarters[quarter], a, total, input_precision="ieee")
    return unshifted(total, kind)


@triton.jit
def _integers(
    x_at, real, weight, line, first, past, depth, W: tl.constexpr, EVICTION: tl.constexpr
):
    """A step is a run, whose four quarters belong to one group, to two, or to four."""
    kind: tl.constexpr = x_at.dtype.element_ty
    total = tl.zeros([line.shape[0], x_at.shape[1]], tl.float32)
    place = tl.arange(0, W.run // 4)
    numbers_at = weight.numbers + line[:, None] * words(depth, W) + place[None, :]
    scales = _of_quarters(weight.scales, line, first, past, W)
    zeros = _zeros_of_quarters(weight.zeros, line, first, past, W)
    for k in range(first, past, W.run):
        # a step ahead, as above
        coming = _of_quarters(weight.scales, line, k + W.run, past, W)
        coming_zeros = _zeros_of_quarters(weight.zeros, line, k + W.run, past, W)
        # words are padded to whole runs: no mask
        found = tl.load(numbers_at + k // 4, eviction_policy=EVICTION)
        quarters = integers4(found, zeros, kind)
        # sums of one group each, since a scale multiplies sums and not numbers
        part = tl.zeros_like(total)
        for quarter in tl.static_range(4):
            inside = (place + 32 * quarter < past - k)[:, None] & real[None, :]
            a = tl.load(x_at + k + 32 * quarter, mask=inside, other=0.0)
            part = tl.dot(quarters[quarter], a, part, input_precision="ieee")
            if quarter == 3 or (quarter + 1) * 32 % W.wide == 0:
                total += part * scales[quarter][:, None]
                part = tl.zeros_like(total)
        scales, zeros = coming, coming_zeros
    return total


@triton.jit
def _of_quarters(shared, line, k, past, W: tl.constexpr):
    """What the groups of a run's four quarters share, from a depth on: float32 [lines] each."""
    at = shared + line * W.columns
    one = tl.load(at + tl.minimum(k, past - 1) // W.wide).to(tl.float32)
    two, three, four = one, one, one
    if W.wide <= 64:
        three = tl.load(at + tl.minimum(k + 64, past - 1) // W.wide).to(tl.float32)
        four = three
    if W.wide == 32:
        two = tl.load(at + tl.minimum(k + 32, past - 1) // W.wide).to(tl.float32)
        four = tl.load(at + tl.minimum(k + 96, past - 1) // W.wide).to(tl.float32)
    return one, two, three, four


@triton.jit
def _zeros_of_quarters(zeros, line, k, past, W: tl.constexpr):
    """The zero points of a run's four quarters; the middle of the codes where there are none."""
    if W.zeros:
        return _of_quarters(zeros, line, k, past, W)
    else:  # noqa: RET505 (as above)
        middle = tl.full([line.shape[0]], 8.0, tl.float32)
        return middle, middle, middle, middle


@triton.jit
def _repeated(x):
    """Each column of x sixteen times in a row."""
    return (
        x[:, :, None].broadcast_to(x.shape[0], x.shape[1], 16).reshape(x.shape[0], x.shape[1] * 16)
    )


@triton.jit
def factored(total, factors, line, W: tl.constexpr):
    """Sums of lines times their factors, or divided by them; without factors as they are."""
    if W.divided:
        total = total / tl.load(factors + line)[:, None]
    elif W.factors:
        total = total * tl.load(factors + line)[:, None]
    return total
