"""How the programs of a chain wait for what others write."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from peagle.ops.triton.gluon import meet


@gluon.jit
def arrive(arrivals):
    """Tell that this program has written its part."""
    publish()
    # all warps have stored before one thread counts for them
    meet()
    gl.atomic_add(arrivals, 1, sem="release")


@gluon.jit
def wait_for(arrivals, count):
    """Wait for `count` arrivals; what the programs wrote before them is then visible."""
    while _seen(arrivals) < count:
        pass


@gluon.jit
def publish():
    """Order plain stores before the copies that read them; writer and reader both have to."""
    gl.inline_asm_elementwise(
        "{ fence.proxy.async; mov.b32 $0, $1; }",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _seen(arrivals):
    # a plain load could be taken out of the loop, or find an old count in L1 for ever
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [arrivals], gl.int32, is_pure=False, pack=1
    )
