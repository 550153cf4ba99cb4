"""What a chain's loading warp does: fill the ring with panels of weights and of their inputs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from peagle.ops.triton.layer_chain.shape import HEIGHT, LAYOUT3, LAYOUT4, PANEL
from peagle.ops.triton.layer_chain.signals import publish, wait_for

STAGGER = gl.constexpr(5)
"""Steps by which a program's way through the depth begins behind its neighbour's: where all read
the same columns of their rows, memory gives 3 % less."""


@gluon.jit
def load_all(ring, weights, rest, sources, arrivals, SHAPE: gl.constexpr):
    """Fill slots for the four products.

    rest: copies the last 16 lines of tiles of 48, since a box is a power of two high.
    """
    out: gl.constexpr = SHAPE.out_link
    gate: gl.constexpr = SHAPE.gate_link
    down: gl.constexpr = SHAPE.down_link
    qkv: gl.constexpr = SHAPE.qkv_link
    done = _load(0, ring, weights[0], rest, sources[0], arrivals, 0, out, SHAPE)
    done = _load(done, ring, weights[1], rest, sources[1], arrivals, out.units, gate, SHAPE)
    everyone = SHAPE.programs
    # out and down arrive once a unit, gate and up once a program
    done = _load(done, ring, weights[2], rest, sources[2], arrivals + 1, everyone, down, SHAPE)
    if SHAPE.qkv > 0:
        _load(done, ring, weights[3], rest, sources[3], arrivals + 2, down.units, qkv, SHAPE)


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

    done: how many slots were filled before; with those that are filled here, it is returned.
    awaited: how many arrivals the input takes; 0: the launch before wrote it.
    """
    count = units_taken(LINK, SHAPE) * LINK.steps
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
def units_taken(LINK: gl.constexpr, SHAPE: gl.constexpr):
    """How many units of a product this program takes."""
    return (LINK.units - gl.program_id(0) + SHAPE.programs - 1) // SHAPE.programs


@gluon.jit
def _load_weight(place, step, ring, weight, rest, LINK: gl.constexpr, SHAPE: gl.constexpr):
    full, free, panels, _ = ring
    slot = place % SHAPE.stages
    arrival = full.index(slot)
    # a barrier knows rounds by their parity; the one before the first counts as over, so that the
    # ring begins free
    mbarrier.wait(free.index(slot), (place // SHAPE.stages & 1) ^ 1)
    # weights and input arrive at one barrier; what a box has outside of its matrix arrives as zeros
    # and counts as well
    mbarrier.expect(arrival, LINK.bytes(SHAPE.rows))
    line = _unit(step, LINK, SHAPE) // LINK.programs * LINK.columns
    first = _first_panel(step, LINK, SHAPE)
    shape: gl.constexpr = SHAPE.boxes(LINK)
    boxes = panels._reinterpret(gl.bfloat16, shape, LAYOUT4 if LINK.kind == "gated" else LAYOUT3)
    at = slot * (shape[0] // SHAPE.stages)
    if LINK.kind == "gated":
        strips: gl.constexpr = LINK.strips
        for strip in gl.static_range(strips):
            _copy(weight, [first, 0, line + strip * 32, 0], arrival, boxes.index(at + strip))
    elif LINK.kind == "plain":
        lines: gl.constexpr = SHAPE.stages * SHAPE.panels * HEIGHT
        # a panel's 64 lines:  0 ... 31   one box
        #                      32 ... 47  `rest`, since a box is a power of two high
        #                      48 ... 63  whatever was there, whose sums nobody stores
        quarters = panels._reinterpret(gl.bfloat16, [lines // 16, 1, 16, PANEL], LAYOUT3)
        together: gl.constexpr = LINK.panels
        for panel in gl.static_range(together):
            half = at + panel * 2
            _copy(weight, [first + panel, line, 0], arrival, boxes.index(half))
            _copy(rest, [first + panel, line + 32, 0], arrival, quarters.index(half * 2 + 2))
    else:
        _copy(weight, [first, line, 0], arrival, boxes.index(at))


@gluon.jit
def _load_input(done, step, ring, source, LINK: gl.constexpr, SHAPE: gl.constexpr):
    full, _, _, inputs = ring
    slot = done % SHAPE.stages
    boxes: gl.constexpr = SHAPE.pieces // LINK.inputs
    shape: gl.constexpr = [SHAPE.stages * boxes, LINK.inputs, SHAPE.rows, PANEL]
    places = inputs._reinterpret(gl.bfloat16, shape, LAYOUT3)
    # at the slot's end: where input and weights share its places, weights fill it from the start
    box = places.index(slot * boxes + boxes - 1)
    _copy(source, [_first_panel(step, LINK, SHAPE), 0, 0], full.index(slot), box)


@gluon.jit
def _unit(step, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """Which unit of work a step belongs to."""
    return gl.program_id(0) + step // LINK.steps * SHAPE.programs


@gluon.jit
def _first_panel(step, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """Where in the depth a step begins, in panels."""
    staggered = (step + gl.program_id(0) * STAGGER) % LINK.steps
    # the programs of a halved tile are neighbours, the even one with the first half of the depth
    share = _unit(step, LINK, SHAPE) % LINK.programs
    return (share * LINK.steps + staggered) * (LINK.panels * LINK.pieces)


@gluon.jit
def _copy(source, place, barrier, box):
    tma.async_copy_global_to_shared(source, place, barrier, box)
