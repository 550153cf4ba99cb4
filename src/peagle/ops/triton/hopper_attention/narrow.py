"""How keys and values are rounded for a cache in E4M3, two in 16 bits, and widened for products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from peagle.ops.triton.gluon import bfloat16_of


@gluon.jit
def kept_of(x, scale, KIND: gl.constexpr):
    """What a cache of type KIND keeps of numbers, in units of a scale."""
    # 448 is the largest number of E4M3, which has no infinity: beyond it there is NaN alone
    x = gl.minimum(gl.maximum(x.to(gl.float32) / scale, -448.0), 448.0)
    return x.to(KIND)


@gluon.jit
def numbers_of(kept, scale, KIND: gl.constexpr):
    """The numbers that a cache keeps, in type KIND."""
    return (kept.to(gl.float32) * scale).to(KIND)


@gluon.jit
def widen(codes, into, scale, TILING: gl.constexpr):
    """From a place of the ring, [keys, size / 2], to an operand of products, [keys, size]."""
    layout: gl.constexpr = TILING.codes
    lower, upper = bfloat16_of(codes.load(layout))
    wide = gl.reshape(gl.join(lower, upper), [TILING.keys, TILING.size])
    if TILING.scaled:
        wide = numbers_of(wide, scale, into.dtype)
    into.store(wide)
