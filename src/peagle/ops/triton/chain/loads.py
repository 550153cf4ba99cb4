"""What a chain's loading warp does: fill the ring with panels of weights and of their inputs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from peagle.ops.triton.chain.shape import PANEL, PANELS
from peagle.ops.triton.chain.signals import publish, wait_for

STAGGER = gl.constexpr(5)
"""Steps by which a program's way through the depth begins behind its neighbour's: where all read
the same columns of their rows, memory gives 3 % less."""


@gluon.jit
def load_all(ring, weights, rest, sources, arrivals, SHAPE: gl.constexpr):
    """Fill slots for the four products. rest: of weights whose tiles are no power of two high."""
    out: gl.constexpr = SHAPE.out_link
    gate: gl.constexpr = SHAPE.gate_link
    down: gl.constexpr = SHAPE.down_link
    qkv: gl.constexpr = SHAPE.qkv_link
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
    LINK: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """Fill slots for one product: weights run ahead of inputs, which others may still write.

    done: slots filled before. Returns them with these. awaited: how many programs' parts the input
    has, counted in arrivals; 0: it is what the launch before wrote.
    """
    count = tiles_taken(LINK, SHAPE) * LINK.steps
    ahead = gl.minimum(count, SHAPE.stages)
    for step in range(ahead):
        _load_weight(done + step, step, ring, weight, rest, LINK, SHAPE)
    if awaited == 0:
        gdc_wait()
    elif count > 0:
        wait_for(arrivals, awaited)
    publish()
    for step in range(ahead):
        _load_input(done + step, step, ring, source, LINK, SHAPE)
    for step in range(ahead, count):
        _load_weight(done + step, step, ring, weight, rest, LINK, SHAPE)
        _load_input(done + step, step, ring, source, LINK, SHAPE)
    return done + count


@gluon.jit
def tiles_taken(LINK: gl.constexpr, SHAPE: gl.constexpr):
    """How many this program takes."""
    return (LINK.tiles - gl.program_id(0) + SHAPE.programs - 1) // SHAPE.programs


@gluon.jit
def _load_weight(place, step, ring, weight, rest, LINK: gl.constexpr, SHAPE: gl.constexpr):
    full, free, halves, quarters, _ = ring
    slot = place % SHAPE.stages
    mbarrier.wait(free.index(slot), (place // SHAPE.stages & 1) ^ 1)
    mbarrier.expect(full.index(slot), LINK.bytes(SHAPE.rows))
    row = (gl.program_id(0) + step // LINK.steps * SHAPE.programs) * LINK.columns
    first = _first_panel(step, LINK)
    for panel in gl.static_range(PANELS):
        half = (slot * PANELS + panel) * 2
        upper, lower = halves.index(half), halves.index(half + 1)
        column = (first + panel * LINK.pieces) * PANEL
        _copy(weight, row, column, full.index(slot), upper)
        if LINK.kind == "folded":
            _copy(weight, row, column + PANEL, full.index(slot), lower)
        elif LINK.kind == "gated":
            _copy(weight, row + LINK.outputs, column, full.index(slot), lower)
        else:
            _copy(rest, row + 32, column, full.index(slot), quarters.index(half * 2 + 2))


@gluon.jit
def _load_input(place, step, ring, source, LINK: gl.constexpr, SHAPE: gl.constexpr):
    full, _, _, _, inputs = ring
    pieces: gl.constexpr = PANELS * LINK.pieces
    slot = place % SHAPE.stages
    first = _first_panel(step, LINK)
    for piece in gl.static_range(pieces):
        panel = inputs.index(slot * PANELS * 2 + piece)
        _copy(source, 0, (first + piece) * PANEL, full.index(slot), panel)


@gluon.jit
def _first_panel(step, LINK: gl.constexpr):
    """Where in the depth a step begins, in panels."""
    staggered = (step + gl.program_id(0) * STAGGER) % LINK.steps
    return staggered * (PANELS * LINK.pieces)


@gluon.jit
def _copy(source, row, column, barrier, panel):
    tma.async_copy_global_to_shared(source, [row, column], barrier, panel)
