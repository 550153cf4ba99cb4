"""What the kernels that are written in Gluon share."""

import hashlib
from pathlib import Path

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from peagle.ops.triton.widening import OF_BYTES, OF_CODES, OF_E2M1, OF_E4M3, OF_SCALES

meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""The warps of a partition wait for each other."""


def digest(file: str) -> str:
    """A digest of a source file that says what a kernel's constants mean, to be one of them.

    Compiled kernels are kept by their own source and their constants: without it one that was
    compiled for another meaning would be found again.
    """
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, READERS: gl.constexpr = 1):
    """The barriers of a ring: for each place one that says it is full, and one that it is free, as
    so many readers say."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(free.index(place), count=READERS)
    # the engine that copies sees shared memory by a path of its own
    fence_async_shared()
    meet()
    return full, free


@gluon.jit
def bfloat16_of(codes):
    """The lower and the upper number of each 16 bits, as `widening.e4m3` finds them."""
    return _both_of(OF_E4M3, codes)


@gluon.jit
def codes_of(numbers):
    """The inverse of `bfloat16_of`, for numbers of 8 bits: [rows, columns] to half the columns."""
    bits = numbers.to(gl.uint8, bitcast=True).to(gl.int16)
    lower, upper = gl.split(gl.reshape(bits, [bits.shape[0], bits.shape[1] // 2, 2]))
    return lower | (upper << 8)


@gluon.jit
def bytes_of(codes):
    """As `widening.integers8`."""
    return _both_of(OF_BYTES, codes)


@gluon.jit
def integers_of(codes, less):
    """As `widening.integers4`, with -128 less one zero point for the codes of 16 bits."""
    return _four_of(OF_CODES, codes, less, less, less, less)


@gluon.jit
def less_of(zeros):
    """-128 less zero points, which are bytes, in bfloat16."""
    # of its mantissa a zero point is the lower bits; 0xC300 is -128
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0xC3, 0x4140; prmt.b32 $1, $2, 0xC3, 0x4342;",
        "=r,=r,r",
        [zeros],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def e2m1_of(codes, first, second, third, fourth):
    """As `widening.e2m1`, with a scale for each of the four numbers."""
    return _four_of(OF_E2M1, codes, first, second, third, fourth)


@gluon.jit
def scales_of(codes):
    """As `widening.scales_e4m3`."""
    return gl.inline_asm_elementwise(
        OF_SCALES, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.jit
def pairs_of_scales(words):
    """As `scales_of`, of the four bytes of each word, the lowest first: two in a word."""
    return gl.inline_asm_elementwise(
        OF_SCALES, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def two_of(pairs):
    """The lower and the upper bfloat16 number of each word."""
    lower, upper = pairs.to(gl.int16), (pairs >> 16).to(gl.int16)
    return lower.to(gl.bfloat16, bitcast=True), upper.to(gl.bfloat16, bitcast=True)


@gluon.jit
def of_quad(x, LANE: gl.constexpr):
    """What one of each four neighbouring threads has, for all of them."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1C1F, 0xFFFFFFFF;",
        "=r,r,r",
        [x, gl.to_tensor(LANE)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def appended(a, b):
    """Columns of b behind those of a."""
    joined = gl.permute(gl.join(a, b), (0, 2, 1))
    return gl.reshape(joined, [a.shape[0], 2 * a.shape[1]])


@gluon.jit
def _both_of(ASM: gl.constexpr, codes):
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


@gluon.jit
def _four_of(ASM: gl.constexpr, codes, first, second, third, fourth):
    return gl.inline_asm_elementwise(
        ASM,
        "=r,=r,=r,=r,r,r,r,r,r",
        [codes, first, second, third, fourth],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
