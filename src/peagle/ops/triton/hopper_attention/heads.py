"""Heads of a product's rows, normed and rotated."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def heads_at(at, mask, TILING: gl.constexpr):
    """A head of each row, and the same with lanes half a head away. at, mask: [rows]."""
    lane = gl.arange(0, TILING.size, gl.SliceLayout(0, TILING.rows))[None, :]
    x = gl.load(at[:, None] + lane, mask=mask[:, None], other=0.0)
    crossed = (lane + TILING.size // 2) % TILING.size
    return x, gl.load(at[:, None] + crossed, mask=mask[:, None], other=0.0)


@gluon.jit
def position_of(row, placed, TILING: gl.constexpr):
    """Positions of a request's rows: one behind another, or a tree's.

    placed: where positions and ancestors of the request's rows lie, the first position, and how
    many rows there are.
    """
    positions, _, start, count = placed
    if TILING.tree:
        return gl.load(positions + row, mask=row < count, other=0).to(gl.int32)
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        return start + row


@gluon.jit
def turns(rotations, positions, weight, TILING: gl.constexpr):
    """The rotation at [rows] positions times the norm's weight: what lanes are multiplied by, and
    what the lanes half a head away are."""
    lane = gl.arange(0, TILING.size, gl.SliceLayout(0, TILING.rows))[None, :]
    turn = rotations + positions[:, None] * (2 * TILING.size) + lane
    own, crossed = gl.load(turn), gl.load(turn + TILING.size)
    if TILING.norm:
        own = own * gl.load(weight + lane).to(gl.float32)
        far = (lane + TILING.size // 2) % TILING.size
        crossed = crossed * gl.load(weight + far).to(gl.float32)
    return own, crossed


@gluon.jit
def values_at(at, kept, eps, TILING: gl.constexpr):
    """Rows of values, normed without a weight where values are."""
    v, _ = heads_at(at, kept, TILING)
    x = v.to(gl.float32)
    if TILING.v_norm:
        x *= gl.rsqrt(gl.sum(x * x, 1) / TILING.size + eps)[:, None]
    return x.to(v.dtype)


@gluon.jit
def turned(heads, by, eps, TILING: gl.constexpr):
    """Rows of heads in float32. heads: of `heads_at`; by: of `turns`."""
    x = heads[0].to(gl.float32)
    rotated = x * by[0] + heads[1].to(gl.float32) * by[1]
    # one over the rms is a number per row, so the rotation may come before it
    if TILING.norm:
        rotated = rotated * gl.rsqrt(gl.sum(x * x, 1) / TILING.size + eps)[:, None]
    return rotated
