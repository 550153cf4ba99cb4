"""What the kernels that are written in Gluon share."""

import hashlib
from pathlib import Path

from triton.experimental.gluon import language as gl

meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""The warps of a partition wait for each other."""


def digest(file: str) -> str:
    """Of a source file that says what a kernel's constants mean, to be one of them.

    Compiled kernels are kept by their own source and their constants: without it one that was
    compiled for another meaning would be found again.
    """
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
