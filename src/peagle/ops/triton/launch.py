"""Programmatic dependent launch: a kernel starts while the one before it still ends.

Between two kernels of a captured cycle memory is idle for some 2 us. A kernel launched with
`overlap` is on the multiprocessors by then; it waits in `begin`, or between `announce` and `wait`,
until all that was launched before is done and visible. Every program of such a kernel must wait
before it writes what another kernel reads, and before it reads what another kernel wrote, unless a
fence was launched in between (`fences`). One that announces after its wait is a fence itself.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.ops.triton import HOPPER
from peagle.ops.triton.fences import fence

H200_SHARED_MEMORY, H200_PROCESSORS = 227 << 10, 132
"""What the interpreter pretends that its GPU has."""


def overlap(x: Tensor, wanted: bool = True) -> dict[str, Any]:
    """Options of a launch that overlaps, with the constant by which its kernel announces at once.

    Where a GPU cannot overlap launches, and where that is not wanted, the launch is a fence.
    """
    if wanted and overlaps(x):
        return {"OVERLAP": True, "launch_pdl": True}
    fence()
    return {"OVERLAP": False}


def overlaps(x: Tensor) -> bool:
    """Whether launches on the device of x may overlap."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= HOPPER


def shared_memory(x: Tensor) -> int:
    """The most bytes of shared memory that one program may have."""
    return int(_properties(x.device)["max_shared_mem"])


def multiprocessors(x: Tensor) -> int:
    """How many multiprocessors the GPU has: at least as many programs run at once."""
    return int(_properties(x.device)["multiprocessor_count"])


@functools.cache
def _properties(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"max_shared_mem": H200_SHARED_MEMORY, "multiprocessor_count": H200_PROCESSORS}
    return triton.runtime.driver.active.utils.get_device_properties(device.index)


@functools.cache
def counters(device: torch.device, count: int) -> Tensor:
    """Zeros that programs count each other with; every launch leaves them at zero.

    Kernels share these counters, so each kernel touches them only after its wait.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)


@triton.jit
def announce(OVERLAP: tl.constexpr):
    """Let the next kernel start as soon as there is room."""
    if OVERLAP:
        # a program that ends has announced by that: one that returns early holds nobody up
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait for everything launched before."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Announce, then wait."""
    announce(OVERLAP)
    wait(OVERLAP)


@triton.jit
def prefetch(pointers):
    """Ask for 128 bytes at each pointer, so that L2 has them when they are loaded."""
    # inline assembly must give something: a zero that nobody reads. Called pure, it would be
    # removed for that
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
