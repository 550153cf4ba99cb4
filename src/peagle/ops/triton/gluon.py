"""What the kernels that are written in Gluon share."""

import hashlib
from pathlib import Path

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""The warps of a partition wait for each other."""


def digest(file: str) -> str:
    """A digest of a source file that says what a kernel's constants mean, to be one of them.

    Compiled kernels are kept by their own source and their constants: without it one that was
    compiled for another meaning would be found again.
    """
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


@gluon.jit
def ring_barriers(STAGES: gl.constexpr):
    """The barriers of a ring: for each place one that says it is full, and one that it is free."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(free.index(place), count=1)
    # the engine that copies sees shared memory by a path of its own
    fence_async_shared()
    meet()
    return full, free
