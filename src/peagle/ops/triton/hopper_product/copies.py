"""What the copying warp does: fill the ring with lines of the weight, and with rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from peagle.ops.triton.hopper_product.shape import BOX, GROUPS


@gluon.jit
def copy_all(ring, boxes, panels, outputs, share, work, P: gl.constexpr):
    """Fill slots for a program's share of the work."""
    first, last = share
    ahead = gl.minimum(last, first + P.stages)
    for unit in range(first, ahead):
        _copy_numbers(unit - first, unit, ring, boxes, outputs, work, P)
    # a weight is nobody's result: what is copied of it does not wait for the launch before
    gdc_wait()
    for unit in range(first, ahead):
        _copy_inputs(unit - first, unit, ring, panels, work, P)
    for unit in range(ahead, last):
        _copy_numbers(unit - first, unit, ring, boxes, outputs, work, P)
        _copy_inputs(unit - first, unit, ring, panels, work, P)


@gluon.jit
def _copy_numbers(place, unit, ring, boxes, outputs, work, P: gl.constexpr):
    full, free, numbers, _ = ring
    across, of_tile, _ = work
    slot = place % P.stages
    # a barrier knows rounds by their parity; the one before the first counts as over
    mbarrier.wait(free.index(slot), (place // P.stages & 1) ^ 1)
    mbarrier.expect(full.index(slot), P.slot)
    line = unit // of_tile // across * (GROUPS * P.columns)
    count: gl.constexpr = P.boxes
    for box in gl.static_range(count):
        # a group's lines are 32 gates and the 32 that they gate, or 64 neighbours
        at = line + box // 2 * BOX + box % 2 * outputs if P.form.gated else line + box * BOX
        into, word = numbers.index(slot * P.boxes + box), unit % of_tile * P.words
        tma.async_copy_global_to_shared(boxes, [at, word], full.index(slot), into)


@gluon.jit
def _copy_inputs(place, unit, ring, panels, work, P: gl.constexpr):
    full, _, _, inputs = ring
    across, of_tile, _ = work
    slot = place % P.stages
    at = [unit % of_tile * 2, unit // of_tile % across * P.rows, 0]
    tma.async_copy_global_to_shared(panels, at, full.index(slot), inputs.index(slot))
