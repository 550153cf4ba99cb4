"""A server as a process of its own, on a free port."""

import glob
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from httpx2 import URL

from peagle.bench.http import HttpSession
from peagle.bench.server_metrics import samples
from peagle.errors import InputError
from peagle.server_url import server_url

HOST = "127.0.0.1"
START_SECONDS, END_SECONDS, STEP = 120.0, 60.0, 0.2
SHOWN = 3000
"""Letters of a log that are told, the last ones."""


@dataclass(frozen=True)
class ServerProcess:
    """A running server."""

    port: int
    pid: int
    start_seconds: float
    """That it took to answer."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    @property
    def root(self) -> URL:
        """The same, for a client."""
        return server_url(self.url)


@contextmanager
def started(
    command: Sequence[str],
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[ServerProcess]:
    """A server that is ready; nothing of it is left behind.

    command: but for the port, which follows it. Raises `InputError` with the end of its log if it
    does not start.
    """
    with socket.create_server((HOST, 0)) as free:
        port: int = free.getsockname()[1]
    begin = time.monotonic()
    with (
        log.open("w+", errors="replace")
        if log
        else tempfile.TemporaryFile("w+", errors="replace") as sink
    ):
        process = subprocess.Popen(
            [*command, str(port)], env=environment, stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            while not _is_healthy(port):
                if process.poll() is not None or time.monotonic() - begin > start_seconds:
                    sink.seek(0)
                    told = sink.read()[-SHOWN:]
                    raise InputError(f"{shlex.join(command)} did not start:\n{told}")
                time.sleep(STEP)
            yield ServerProcess(port, process.pid, time.monotonic() - begin)
        finally:
            _end(process)


def family(first: Iterable[int]) -> set[int]:
    """Some processes and all that they started, as far as they live."""
    parents = {}
    for place in map(Path, glob.iglob("/proc/[0-9]*/stat")):  # `Path.glob` raises when one ends
        with suppress(OSError, ValueError, IndexError):  # it ended, or is half read
            _, _, told = place.read_text(errors="replace").rpartition(")")
            parents[int(place.parent.name)] = int(told.split()[1])
    members = set(first) & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= more
    return members


async def page(root: URL, path: str) -> bytes | None:
    """A page of a server, over a connection of its own; None if there is none."""
    async with HttpSession(root) as connection:
        return await connection.get(path)


async def scraped(root: URL) -> list[tuple[str, str, float]]:
    """Name, labels and value of every sample that a server's /metrics have."""
    found = await page(root, "/metrics")
    return [] if found is None else [*samples(found.decode())]


def _is_healthy(port: int) -> bool:
    """Whether a server's /health is well."""
    with suppress(OSError):
        urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2).close()
        return True
    return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a server to end, then end what is left of it."""
    members = family([process.pid])
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    for pid in members:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
