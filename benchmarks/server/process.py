"""`peagle serve` as a process of its own, on a free port."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 120


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    port: int
    pid: int

    @property
    def memory(self) -> int:
        """Bytes of memory that it holds."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serve(flags: Sequence[str], log: Path) -> Iterator[Server]:
    """Start it, wait until it answers, and end it by SIGTERM."""
    command = [sys.executable, "-m", "peagle.cli", "serve", "--port"]
    with _running(command, flags, log) as server:
        yield server


@contextmanager
def bare(arguments: Sequence[str], log: Path) -> Iterator[Server]:
    """The same for `bare.py`."""
    command = [sys.executable, str(Path(__file__).parent / "bare.py")]
    with _running(command, arguments, log) as server:
        yield server


@contextmanager
def _running(command: Sequence[str], rest: Sequence[str], log: Path) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("w") as sink:
        process = subprocess.Popen([*command, str(port), *rest], stdout=sink, stderr=sink)
    try:
        _wait(port, process, log)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.2)
