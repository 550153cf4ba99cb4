"""Servers that are measured, each a process of its own."""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from peagle.bench.server_process import ServerProcess, listening, started


def serve(flags: Sequence[str], log: Path | None = None) -> AbstractContextManager[ServerProcess]:
    """`peagle serve`, once it answers."""
    return started([sys.executable, "-m", "peagle", "serve", *flags, "--port"], log)


def bare(arguments: Sequence[str], log: Path) -> AbstractContextManager[ServerProcess]:
    """`bare.py`, which listens once its engine is loaded."""
    command = [sys.executable, str(Path(__file__).parent / "bare.py"), *arguments]
    return started(command, log, ready=listening)


def memory(pid: int) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
