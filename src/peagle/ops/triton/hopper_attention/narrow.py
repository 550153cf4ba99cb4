"""How keys and values are kept in E4M3, two in 16 bits, and widened where products read them.

Four warps read a tile of codes from the ring as they would read numbers of 16 bits, turned round
where these are values. Each code becomes two numbers in the registers of the thread that multiplies
it, so that shared memory is read once and written by copies alone. A code's numbers are neighbours
in a head, and all even ones come before the odd ones here: queries are laid out alike, and what
rows draw is put in order at the end.

    the ring   [keys, size / 2]    code j of a key: its numbers 2 j and 2 j + 1
    keys       [keys, size]        0 2 4 … size - 2 | 1 3 5 … size - 1
    values     [size, keys]        the same, downwards
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from peagle.ops.triton.gluon import appended, bfloat16_of


@gluon.jit
def kept_of(x, scale, KIND: gl.constexpr):
    """What a cache of type KIND keeps of numbers, in units of a scale."""
    # 448 is the largest number of E4M3, which has no infinity: beyond it there is NaN alone
    x = gl.minimum(gl.maximum(x.to(gl.float32) / scale, -448.0), 448.0)
    return x.to(KIND)


@gluon.jit
def keys_of(codes, scale, KIND: gl.constexpr, TILING: gl.constexpr):
    """A left operand, [keys, size], of type KIND from a place of the ring."""
    lower, upper = bfloat16_of(codes.load(TILING.left))
    return _operand(appended(lower, upper), scale, KIND, TILING)


@gluon.jit
def values_of(codes, scale, KIND: gl.constexpr, TILING: gl.constexpr):
    """A left operand, [size, keys], of type KIND from a place of the ring."""
    lower, upper = bfloat16_of(codes.permute((1, 0)).load(TILING.left))
    both = gl.permute(gl.join(lower, upper), (2, 0, 1))
    return _operand(gl.reshape(both, [TILING.size, TILING.keys]), scale, KIND, TILING)


@gluon.jit
def _operand(numbers, scale, KIND: gl.constexpr, TILING: gl.constexpr):
    if TILING.scaled:
        numbers = numbers.to(gl.float32) * scale
    # of heads of 64, two warps hold the values that four multiply
    numbers = gl.convert_layout(numbers, TILING.left, assert_trivial=TILING.size == 128)
    return numbers.to(KIND)


@gluon.jit
def evens_first(lines, TILING: gl.constexpr):
    """Lines of a head, [lines, size], with all even numbers before the odd ones."""
    pairs = gl.reshape(lines, [lines.shape[0], TILING.size // 2, 2])
    return gl.reshape(gl.permute(pairs, (0, 2, 1)), [lines.shape[0], TILING.size])


@gluon.jit
def in_order(lines, TILING: gl.constexpr):
    """The inverse of `evens_first`."""
    halves = gl.reshape(lines, [lines.shape[0], 2, TILING.size // 2])
    return gl.reshape(gl.permute(halves, (0, 2, 1)), [lines.shape[0], TILING.size])
