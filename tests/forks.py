"""Commands of this Python as forks of a zygote (`zygote.py`), which has imported torch and peagle.

`Popen` stands in for `subprocess.Popen`. What it makes is a child of this process like any other,
with its own signals, files, memory and exit code; only the imports are not its own, nor what they
read from the environment.
"""

import ctypes
import functools
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
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)
PLACEHOLDER = ["/bin/true"]
"""What runs, for a moment, where a fork of the zygote is to run."""
KNOWN = {
    *("stdin", "stdout", "stderr", "cwd", "env", "pass_fds", "start_new_session"),
    *("bufsize", "text", "encoding", "errors", "universal_newlines"),
}
"""Options of `subprocess.Popen` that a fork follows."""


def can_fork() -> bool:
    """Whether this is a system on which orphans can be adopted."""
    return sys.platform == "linux"


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen`, which lets a zygote fork the commands of this Python."""

    zygote: "Zygote | None" = None
    """Who forks them; without one they are started as ever."""

    def __init__(self, args: Any, *positional: Any, **options: Any) -> None:
        if self.zygote is None or positional or not can_be_forked(args, options):
            super().__init__(args, *positional, **options)
            return
        asked = description([os.fsdecode(word) for word in args[1:]], options)
        with tempfile.TemporaryFile("w+") as file, self.zygote.turn():
            json.dump(asked, file)
            file.flush()
            # in the placeholder, whose open files are those that the command is to have
            ask = functools.partial(self.zygote.ask, file.fileno(), *asked["places"])
            super().__init__(PLACEHOLDER, preexec_fn=ask, **options)
            os.waitpid(self.pid, 0)
            self.args, self.pid = args, self.zygote.forked()


def can_be_forked(args: Any, options: dict[str, Any]) -> bool:
    """Whether a command is for this Python, in a form that the zygote knows."""
    if isinstance(args, (str, bytes, os.PathLike)) or not set(options) <= KNOWN:
        return False
    program, *words = map(os.fsdecode, args)
    how, *more = (words[1:] if words[:1] in (["-P"], ["-u"]) else words) or [""]
    known = bool(more) if how in ("-c", "-m") else how[:1] not in ("", "-")
    return known and program == sys.executable


def description(words: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """What the zygote is told of a command, besides its open files."""
    given = os.environ if options.get("env") is None else options["env"]
    return {
        "words": words,
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()},
        "cwd": os.path.abspath(os.fsdecode(options.get("cwd") or ".")),
        "places": [0, 1, 2, *options.get("pass_fds", ())],
        "new_session": bool(options.get("start_new_session")),
        "interrupted": signal.getsignal(signal.SIGINT) != signal.SIG_IGN,
    }


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

    @contextmanager
    def turn(self) -> Iterator[None]:
        """In the block nobody else asks, and orphans among our descendants become our children."""
        with self._turn:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                yield
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def ask(self, *descriptors: int) -> None:
        """Ask for a fork: the description of its command, then its standard streams and files."""
        socket.send_fds(self._line, [b"fork"], descriptors)

    def forked(self) -> int:
        """The process id of the fork that was asked for."""
        pid = self._line.recv(16)
        if not self._line.recv(16):  # which says that it is an orphan no more
            raise RuntimeError("the zygote ended; why is among its errors")
        return int(pid)
