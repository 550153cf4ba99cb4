"""Sums of a weight's products for any kernel; packed numbers are widened in registers.

16 bits have two numbers of eight bits or four of four, of inputs that are a half or a quarter of a
run apart. A thread widens what it has and multiplies it in the order of inputs, with as many
instructions of a tensor core as possible in a row: each wait for them takes longer than they do.
Scales of eight bits and of integers multiply float32 sums of one block each; those of E2M1 multiply
its numbers. An output's factor and what follows are left to the kernel.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton.tiles import padded
from peagle.ops.triton.widening import (
    e2m1,
    e4m3,
    integers4,
    integers8,
    part_of,
    powers,
    scales_e4m3,
    unshifted,
)
from peagle.ops.weight import E4M3, Weight

FEW = tl.constexpr(padded(1))
"""Rows of the smallest tile."""


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
    step: int
    """Inputs that a program reads at a time."""

    @classmethod
    def of(cls, weight: Weight, step: int) -> "Packing":
        """The packing of a weight."""
        if isinstance(weight, Tensor):
            return cls("dense", 1, 1, 1, 1, False, False, False, 1, step)
        zeros, factors = weight.zeros is not None, weight.factors is not None
        name, columns = weight.format.name, weight.scales.shape[-1]
        has = zeros, factors, weight.divided
        return cls(name, weight.run, *weight.block, columns, *has, 16 // weight.format.bits, step)


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
def first_inputs(W: tl.constexpr):
    """For each 16 bits of a step, the input of their first number, as `_in_order` draws it."""
    apart: tl.constexpr = W.run // W.together
    place = tl.arange(0, W.step // W.together)
    return place // apart * W.run + place % apart


@triton.jit
def sums(x_at, real, weight, line, first, past, depth, W: tl.constexpr, EVICTION: tl.constexpr):
    """Lines of the weight times rows, over a range of the depth: [lines, rows].

    x_at: [rows] at a depth of 0; real: rows that are there; first: a multiple of a step, and so is
    past unless the depth ends there.
    """
    if W.kind == "dense":
        return _dense(x_at, real, weight, line, first, past, depth, W, EVICTION)
    elif W.together == 2:  # noqa: RET505 (as above)
        return _eight_bits(x_at, real, weight, line, first, past, depth, W, EVICTION)
    elif W.kind == "int4":
        return _integers(x_at, real, weight, line, first, past, depth, W, EVICTION)
    else:
        return _fp4(x_at, real, weight, line, first, past, depth, W, EVICTION)


@triton.jit
def _inputs(x_at, real, first, past, COUNT: tl.constexpr):
    """So many inputs of rows, from the first one on: [inputs, rows]."""
    place = tl.arange(0, COUNT)
    inside = (place < past - first)[:, None] & real[None, :]
    return tl.load(x_at[None, :] + place[:, None] + first, mask=inside, other=0.0)


@triton.jit
def _dense(x_at, real, weight, line, first, past, depth, W: tl.constexpr, EVICTION: tl.constexpr):
    place = tl.arange(0, W.step)
    numbers_at = weight.numbers + line[:, None] * depth + place[None, :]
    total = tl.zeros([line.shape[0], x_at.shape[0]], tl.float32)
    for k in range(first, past, W.step):
        inside = (place < past - k)[None, :]
        found = tl.load(numbers_at + k, mask=inside, other=0.0, eviction_policy=EVICTION)
        total = tl.dot(found, _inputs(x_at, real, k, past, W.step), total, input_precision="ieee")
    return total


@triton.jit
def _eight_bits(
    x_at, real, weight, line, first, past, depth, W: tl.constexpr, EVICTION: tl.constexpr
):
    kind: tl.constexpr = x_at.dtype.element_ty
    half: tl.constexpr = W.run // 2
    place = tl.arange(0, W.step // 2)
    numbers_at = weight.numbers + line[:, None] * (depth // 2) + place[None, :]
    halves_at = x_at[None, :] + first_inputs(W)[:, None]
    scales_at = weight.scales + (line // W.high) * W.columns
    total = tl.zeros([line.shape[0], x_at.shape[0]], tl.float32)
    scale = tl.load(scales_at + first // W.wide)
    for k in range(first, past, W.step):
        # a step ahead: unlike the rest it is not copied to shared memory beforehand
        coming = tl.load(scales_at + tl.minimum(k + W.step, past - 1) // W.wide)
        inside = place < (past - k) // 2
        found_at = numbers_at + k // 2
        found = tl.load(found_at, mask=inside[None, :], other=0, eviction_policy=EVICTION)
        numbers = e4m3(found, kind) if W.kind == "fp8" else integers8(found, kind)
        if x_at.shape[0] == FEW and W.step == W.run:
            a = _inputs(x_at, real, k, past, W.step)
            part = tl.dot(_in_order(numbers, W), a, input_precision="ieee")
        else:
            # two products of half the inputs each keep fewer numbers in registers; of whole runs
            # both take the inputs in one order
            mask = inside[:, None] & real[None, :]
            a = tl.load(halves_at + k, mask=mask, other=0.0)
            b = tl.load(halves_at + k + half, mask=mask, other=0.0)
            part = tl.dot(numbers[0], a, input_precision="ieee")
            part = tl.dot(numbers[1], b, part, input_precision="ieee")
        total += part * scale[:, None].to(tl.float32)
        scale = coming
    return total


@triton.jit
def _fp4(x_at, real, weight, line, first, past, depth, W: tl.constexpr, EVICTION: tl.constexpr):
    kind: tl.constexpr = x_at.dtype.element_ty
    lines: tl.constexpr = line.shape[0]
    total = tl.zeros([lines, x_at.shape[0]], tl.float32)
    place, block = tl.arange(0, W.step // 4), tl.arange(0, W.step // W.wide)
    width = words(past, W)
    numbers_at = weight.numbers + line[:, None] * words(depth, W) + place[None, :]
    scales_at = weight.scales + line[:, None] * W.columns + block[None, :]
    for k in range(first, past, W.step):
        inside = (place < width - k // 4)[None, :]
        found = tl.load(numbers_at + k // 4, mask=inside, other=0, eviction_policy=EVICTION)
        # scales are padded to whole steps (`FP4.columns`): no mask
        scale = tl.load(scales_at + k // W.wide)
        if W.wide == 32:
            one, three = powers(scale, kind).reshape(lines, W.step // 64, 2).split()
            two, four = one, three
        else:
            even, odd = scales_e4m3(scale, kind).reshape(lines, W.step // 64, 2, 2).split()
            one, three = even.split()
            two, four = odd.split()
        repeated = _repeated(one), _repeated(two), _repeated(three), _repeated(four)
        numbers = _in_order(e2m1(found, repeated, kind), W)
        a = _inputs(x_at, real, k, past, W.step)
        total = tl.dot(numbers, a, total, input_precision="ieee")
    return unshifted(total, kind)


@triton.jit
def _integers(
    x_at, real, weight, line, first, past, depth, W: tl.constexpr, EVICTION: tl.constexpr
):
    kind: tl.constexpr = x_at.dtype.element_ty
    lines: tl.constexpr = line.shape[0]
    group: tl.constexpr = W.wide if W.wide < W.run else W.run
    of_run: tl.constexpr = W.run // group
    count: tl.constexpr = W.step // group
    total = tl.zeros([lines, x_at.shape[0]], tl.float32)
    place, number, width = tl.arange(0, W.run // 4), tl.arange(0, count), words(depth, W)
    numbers_at = weight.numbers + line[:, None] * width + place[None, :]
    zeros = tl.full([lines, count], 8.0, tl.float32)  # the middle of the codes
    for k in range(first, past, W.step):
        # neighbours, unless a group is wider than a run: copied beforehand, if two or more
        column = k // W.wide + number if W.wide <= W.run else (k + number * group) // W.wide
        shared_at = line[:, None] * W.columns + column[None, :]
        known = (column < W.columns)[None, :]
        scales = tl.load(weight.scales + shared_at, mask=known, other=0.0).to(tl.float32)
        if W.zeros:
            zeros = tl.load(weight.zeros + shared_at, mask=known, other=0.0).to(tl.float32)
        for run in tl.static_range(W.step // W.run):
            at = k + run * W.run
            inside = (place < width - at // 4)[None, :]
            found = tl.load(numbers_at + at // 4, mask=inside, other=0, eviction_policy=EVICTION)
            of_zeros = part_of(zeros, run, W.step // W.run)
            numbers = _in_order(integers4(found, of_zeros, kind), W)
            # sums of one group each, since a scale multiplies sums and not numbers
            for part in tl.static_range(of_run):
                a = _inputs(x_at, real, at + part * group, past, group)
                own = tl.dot(part_of(numbers, part, of_run), a, input_precision="ieee")
                total += own * part_of(scales, run * of_run + part, count)
    return total


@triton.jit
def _in_order(numbers, W: tl.constexpr):
    """The first, second, ... numbers of words [lines, words] in the order of their inputs."""
    # which inputs the numbers of 16 bits belong to, in the order of the numbers
    #
    #   eight bits, run of 128     0 64 │ 1 65 │ 2 66 │ ... │ 63 127 │ 128 192 │ ...
    #   FP4, run of 64             0 16 32 48 │ 1 17 33 49 │ ... │ 15 31 47 63 │ 64 80 ...
    #   int4, run of 128           0 32 64 96 │ 1 33 65 97 │ ... │ 31 63 95 127 │ 128 160 ...
    #
    # On Hopper a thread keeps its numbers: it has the same places of any 16 neighbours of a line.
    lines: tl.constexpr = numbers[0].shape[0]
    count: tl.constexpr = numbers[0].shape[1]
    apart: tl.constexpr = W.run // W.together
    if W.together == 2:
        pairs = tl.join(numbers[0], numbers[1]).reshape(lines, count // apart, apart, 2)
        return pairs.permute(0, 1, 3, 2).reshape(lines, 2 * count)
    else:  # noqa: RET505 (as above)
        pairs = tl.join(tl.join(numbers[0], numbers[1]), tl.join(numbers[2], numbers[3]))
        pairs = pairs.reshape(lines, count // apart, apart, 2, 2)
        return pairs.permute(0, 1, 4, 3, 2).reshape(lines, 4 * count)


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
