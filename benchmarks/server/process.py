"""`peagle serve` as a process of its own, on a free port."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from peagle.bench.http import Address

START_SECONDS = 120


@dataclass(frozen=True)
class Server:
    """A running server."""

    port: int
    pid: int

    @property
    def address(self) -> Address:
        """Where it listens."""
        return Address.of(f"http://127.0.0.1:{self.port}")

    @property
    def memory(self) -> int:
        """Bytes of memory that the process holds."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def serve(flags: Sequence[str], log: Path) -> AbstractContextManager[Server]:
    """Start `peagle serve`, wait until it answers, and end it with SIGTERM."""
    return _running([sys.executable, "-m", "peagle", "serve", "--port"], flags, log, _healthy)


def bare(arguments: Sequence[str], log: Path) -> AbstractContextManager[Server]:
    """The same for `bare.py`, which listens once its engine is loaded."""
    command = [sys.executable, str(Path(__file__).parent / "bare.py")]
    return _running(command, arguments, log, _listening)


@contextmanager
def _running(
    command: Sequence[str], rest: Sequence[str], log: Path, ready: Callable[[int], None]
) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("w") as sink:
        process = subprocess.Popen([*command, str(port), *rest], stdout=sink, stderr=sink)
    try:
        _wait(partial(ready, port), process, log)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _healthy(port: int) -> None:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()


def _listening(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), timeout=2).close()


def _wait(ready: Callable[[], None], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `ready` no longer raises `OSError`."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            return ready()
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.2)
