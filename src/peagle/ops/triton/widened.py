"""Packed weights are widened to the type of their inputs, for products that arithmetic bounds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton.weights import Packing, factored, operands, words
from peagle.ops.triton.widening import e2m1_at, e4m3, powers, scales_e4m3
from peagle.ops.weight import QuantizedWeight

LINES, STEP = tl.constexpr(16), 256
"""Lines of the weight that a program widens, and their inputs in a step."""


def widened(weight: QuantizedWeight, rows: slice, dtype: torch.dtype) -> Tensor:
    """Some outputs of a matrix, each number rounded once: [outputs, depth]."""
    depth, count = weight.shape[1], rows.stop - rows.start
    out = torch.empty(count, depth, dtype=dtype, device=weight.device)
    grid = triton.cdiv(count, LINES.value), triton.cdiv(depth, STEP)
    _widen[grid](operands(weight), out, rows.start, count, depth, W=Packing.of(weight, STEP))
    return out


@triton.jit(do_not_specialize=["first"])
def _widen(weight, out, first, count, depth, W: tl.constexpr):
    together: tl.constexpr = W.together
    apart: tl.constexpr = W.run // together
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    line = (first + tl.minimum(row, count - 1)).to(tl.int64)
    run = tl.program_id(1) * (W.step // W.run) + tl.arange(0, W.step // W.run)
    word, width = tl.arange(0, apart), words(depth, W)
    # [lines, runs, words]
    place = (run[:, None] * apart + word[None, :])[None, :, :]
    numbers_at = weight.numbers + line[:, None, None] * width + place
    found = tl.load(numbers_at, mask=place < width, other=0)
    for number in tl.static_range(together):
        # one scale for each number of a run's words: blocks are as wide as these, or wider
        start = run * W.run + number * apart
        # a run may end behind the depth: its last numbers have no scale and are not kept
        block = tl.minimum(start, depth - 1) // W.wide
        shared_at = (line // W.high * W.columns)[:, None] + block[None, :]
        scale = tl.load(weight.scales + shared_at)[:, :, None]
        if W.kind == "mxfp4":
            value = e2m1_at(found, number, powers(scale, tl.float32))
        elif W.kind == "nvfp4":
            value = e2m1_at(found, number, scales_e4m3(scale, tl.float32))
        elif W.kind == "fp8":
            value = e4m3(found, tl.float32)[number] * scale.to(tl.float32)
        else:
            codes = _integer(found, number, weight.zeros + shared_at, W)
            value = codes * scale.to(tl.float32)
        value = value.reshape(LINES, W.step // W.together)
        value = factored(value, weight.factors, line, W).reshape(found.shape)
        at = (start[:, None] + word[None, :])[None, :, :]
        out_at = out + row.to(tl.int64)[:, None, None] * depth + at
        keep = (row < count)[:, None, None] & (at < depth)
        tl.store(out_at, value.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _integer(codes, place: tl.constexpr, zeros_at, W: tl.constexpr):
    """The numbers at a place of each 16 bits, less their zero points."""
    if W.kind == "int8":
        value = ((codes >> (8 * place)) & 0xFF).to(tl.int8).to(tl.float32)
    else:
        value = ((codes >> (4 * place)) & 15).to(tl.float32)
    if W.zeros:
        zero = tl.load(zeros_at)[:, :, None]
        if W.kind == "int8":
            zero = zero.to(tl.int8, bitcast=True)
        value -= zero.to(tl.float32)
    elif W.kind == "int4":
        # `MIDDLE`, where a format without zero points has its zero
        value -= 8.0
    return value
