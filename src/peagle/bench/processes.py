"""Processes of this machine, as Linux tells of them: who listens, and who has the cores."""

import glob
import os
import socket
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTENS = "0A"
"""The state of a socket that waits for connections."""
NANOSECONDS = 1e-9
PROGRAMS = 3
"""The columns of a core's line in /proc/stat that programs take: user, nice and system."""


@dataclass(frozen=True)
class CoreTime:
    """How long some processes and all of this machine had its cores so far, in seconds."""

    ran: float
    """All threads of the processes."""
    waited: float
    """They were ready to run, and had no core."""
    others: float
    """Everything else on the cores on which the processes may run, but not this process."""

    def share_since(self, before: "CoreTime") -> float | None:
        """The least share of their time for which no other program kept them from their cores.

        They also wait for one another, so that others took at most as long as they ran themselves.
        None where the processes did nothing, or some ended.
        """
        ran, waited = self.ran - before.ran, self.waited - before.waited
        if ran <= 0.0 or waited < 0.0:
            return None
        taken = min(waited, max(self.others - before.others, 0.0))
        return 1.0 - taken / (ran + waited)


def core_time(first: Iterable[int]) -> CoreTime | None:
    """That of some processes and all that they started; None where Linux does not tell."""
    members = family(first)
    threads = [place for pid in members for place in _places(f"{pid}/task/*/schedstat")]
    times = [tuple(map(int, told)) for place in threads if len(told := _read(place).split()) == 3]
    if not times:
        return None
    cores: set[int] = set()
    for pid in members:
        with suppress(OSError):
            cores |= os.sched_getaffinity(pid)
    ran, waited, _ = (NANOSECONDS * sum(column) for column in zip(*times, strict=True))
    own = 0.0 if os.getpid() in members else time.process_time()
    return CoreTime(ran, waited, _busy_seconds(cores) - ran - own)


def _busy_seconds(cores: Set[int]) -> float:
    """How long programs had some cores."""
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in _read(PROC / "stat").splitlines()]
    ticks = [sum(map(int, counts[:PROGRAMS])) for name, *counts in lines if name in names]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def family(first: Iterable[int]) -> set[int]:
    """Some processes and all that they started, as far as they live."""
    parents = {}
    for place in _places("[0-9]*/stat"):
        name, _, told = _read(place).rpartition(")")
        if name and len(fields := told.split()) > 1:
            parents[int(place.parent.name)] = int(fields[1])
    members = set(first) & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= more
    return members


def _places(pattern: str) -> Iterator[Path]:
    """Files of processes; `Path.glob` raises when one of these ends meanwhile."""
    return map(Path, glob.iglob(f"{PROC}/{pattern}"))


def _read(place: Path) -> str:
    """What a file of a process tells; nothing if that ended. Names may be any bytes."""
    try:
        return place.read_text(errors="replace")
    except OSError:
        return ""


def listeners(host: str, port: int) -> set[int]:
    """The processes of this machine that listen at an address, if it is this machine's.

    Those of other users may be hidden.
    """
    if not _is_here(host, port):
        return set()
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    return {pid for pid, name in _open_files() if name in sockets}


def _is_here(host: str, port: int) -> bool:
    """Whether a host is this machine: only an address of its own can be bound."""
    try:
        [(kind, _, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(kind, socket.SOCK_DGRAM) as trial:
            trial.bind((address[0], 0))
    except OSError:
        return False
    return True


def _listening(port: int) -> Iterator[str]:
    """The inodes of sockets that listen at a port."""
    for table in ("tcp", "tcp6"):
        for line in _read(PROC / "self" / "net" / table).splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and int(local.rpartition(":")[2], 16) == port:
                yield inode


def _open_files() -> Iterator[tuple[int, str]]:
    """Every process that shows its open files, and what each of them is."""
    for place in _places("[0-9]*/fd/*"):
        with suppress(OSError):
            yield int(place.parts[-3]), os.readlink(place)
