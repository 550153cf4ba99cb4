"""How the programs of a chain wait for what others write."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from peagle.ops.triton.gluon import meet


@gluon.jit
def arrive(arrivals):
    """Tell that all before is written."""
    publish()
    meet()
    gl.atomic_add(arrivals, 1, sem="release")


@gluon.jit
def wait_for(arrivals, count):
    """Wait until `count` programs have arrived; what they wrote before is then visible."""
    while _seen(arrivals) < count:
        pass


@gluon.jit
def publish():
    """Order common stores before the copies that read them, on both sides."""
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
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];",
        "=r,l",
        [arrivals],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
