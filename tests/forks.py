"""Commands of this Python as forks of a zygote (`zygote.py`), which has imported torch and peagle.

`Zygote.fork_exec` stands in for the function by which `subprocess` starts a program. What it makes
is a child of this process like any other, with its own signals, files, memory and exit code; only
the imports are not its own, nor what they read from the environment.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)
_fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]


def can_fork() -> bool:
    """Whether this is a system and a version of Python for which `Call` holds."""
    return sys.platform == "linux" and sys.version_info[:2] == (3, 11)


class Call(NamedTuple):
    """What `subprocess` passes to the function that starts a program, as far as it matters here."""

    arguments: Sequence[Any]
    executables: Sequence[bytes]
    close_others: bool
    kept: Sequence[int]
    cwd: Any
    environment: Sequence[bytes] | None
    stdin: int
    to_stdin: int
    from_stdout: int
    stdout: int
    from_stderr: int
    stderr: int
    from_failure: int
    failure: int
    """Where it is told that a program cannot be started; closed without a word if it can."""
    restore_signals: bool
    new_session: bool
    process_group: int
    gid: Any
    gids: Any
    uid: Any
    umask: int
    prepare: Any

    @property
    def words(self) -> list[str]:
        return [os.fsdecode(word) for word in self.arguments[1:]]

    def can_be_forked(self) -> bool:
        """Whether it is for this Python, in a form that the zygote knows."""
        flags, *rest = self.words or [""]
        how, *more = rest or [""] if flags in ("-P", "-u") else [flags, *rest]
        known = bool(more) if how in ("-c", "-m") else how[:1] not in ("", "-")
        ours = os.fsdecode(self.executables[0]) == sys.executable
        return known and ours and not self.prepare and self.process_group == -1

    def description(self) -> dict[str, Any]:
        """What the zygote is told, besides the open files."""
        given = dict(os.environ) if self.environment is None else _variables(self.environment)
        return {
            "words": self.words,
            "environment": given,
            "cwd": os.path.abspath(os.fsdecode(self.cwd or ".")),
            "places": [0, 1, 2, *self._others()],
            "new_session": bool(self.new_session),
            "interrupted": signal.getsignal(signal.SIGINT) != signal.SIG_IGN,
        }

    def descriptors(self) -> list[int]:
        """Its standard streams, which are ours where none is given, and other open files."""
        streams = enumerate((self.stdin, self.stdout, self.stderr))
        return [ours if given < 0 else given for ours, given in streams] + self._others()

    def _others(self) -> list[int]:
        return [descriptor for descriptor in self.kept if descriptor != self.failure]


def _variables(lines: Sequence[bytes]) -> dict[str, str]:
    pairs = (os.fsdecode(line).partition("=") for line in lines)
    return {name: value for name, _, value in pairs}


class Zygote:
    """The zygote, seen from the process whose commands it forks."""

    def __init__(self, line: socket.socket) -> None:
        """line: what the zygote reads."""
        self._line = line
        self._turn = threading.Lock()

    @classmethod
    @contextmanager
    def started(cls) -> Iterator["Zygote"]:
        """One that ends behind the block."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = Path(__file__).with_name("zygote.py")
        with theirs:
            process = subprocess.Popen(
                [sys.executable, script, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        with process, closing(ours):
            yield cls(ours)

    def fork_exec(self, *arguments: Any) -> int:
        """Start a program; returns its process id."""
        call = Call(*arguments[: len(Call._fields)])
        if not call.can_be_forked():
            return int(_fork_exec(*arguments))
        with tempfile.TemporaryFile("w+") as file, self._turn, _adopting():
            json.dump(call.description(), file)
            file.flush()
            socket.send_fds(self._line, [b"fork"], [file.fileno(), *call.descriptors()])
            pid = self._line.recv(16)
            if not self._line.recv(16):  # which says that it is an orphan no more
                raise RuntimeError("the zygote ended; why is among its errors")
        return int(pid)


@contextmanager
def _adopting() -> Iterator[None]:
    """In the block, the orphans among this process's descendants become its children."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
