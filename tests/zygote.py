"""A process that has imported what commands import, runs nothing, and is forked for each of them.

The imports take seconds, a fork milliseconds. What is to run, in which directory and with which
open files, says `forks.py`.
"""

import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

import forks

IMPORTED = (
    "torch.distributed.tensor",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "matplotlib.figure",
    "peagle.async_llm",
    "peagle.bench.report",
    "peagle.cli.app",
    "peagle.engine_client.child",
    "peagle.server.run",
    "peagle.train.trainer",
)
FILES = 512
"""More than the numbers of the files that a command opens, or is given."""


def main(descriptor: int) -> None:
    """Fork commands until nobody can ask for more; in a command's process, run it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for those who asked
    subprocess.Popen = forks.Popen  # type: ignore[misc]  # torchrun takes it when it is imported
    for name in IMPORTED:
        importlib.import_module(name)
    own = [place for place in sys.path[1:] if place not in python_path()]
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.freeze()
    words = command(socket.socket(fileno=descriptor))
    run(words, [*python_path(), *own])


def python_path() -> list[str]:
    """Where the environment lets Python look for modules."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.abspath(place) for place in given if place]


def command(line: socket.socket) -> list[str]:
    """Fork commands that are asked for; returns in each one's process what it is to run.

    One that may start others gets a zygote of its own.
    """
    while True:
        words: list[str] = forked(line)["words"]
        if not starts_others(words):
            return words
        ours, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            line.close()
            use_zygote(ours)
            return words
        ours.close()
        stand_by()


def starts_others(words: list[str]) -> bool:
    """Whether a command may start commands: a script, and torchrun."""
    return words[:2] == ["-m", "torch.distributed.run"] or words[0][0] != "-"


def forked(line: socket.socket) -> dict[str, Any]:
    """Wait for what is asked, and fork: the one who asked adopts the orphan that returns."""
    while True:
        message, descriptors, *_ = socket.recv_fds(line, 16, FILES)
        if not message:
            os._exit(0)
        parent = os.fork()
        if not parent:
            parent = os.getpid()
            if pid := os.fork():
                line.send(str(pid).encode())
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0)
            line.detach()  # closed with all that is not the command's
            return become(*descriptors)
        os.waitpid(parent, 0)
        line.send(b"adopted")
        for descriptor in descriptors:
            os.close(descriptor)


def become(description: int, *descriptors: int) -> dict[str, Any]:
    """Take the directory, environment, session and open files that a description asks for."""
    with open(description, closefd=False) as file:
        file.seek(0)
        asked: dict[str, Any] = json.load(file)
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD, FILES) for each in descriptors]
    os.closerange(3, FILES)
    for place, descriptor in zip(asked["places"], kept, strict=True):
        os.dup2(descriptor, place)
    os.closerange(FILES, 2 * FILES)
    if asked["new_session"]:
        os.setsid()
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    interrupted = signal.default_int_handler if asked["interrupted"] else signal.SIG_IGN
    signal.signal(signal.SIGINT, interrupted)
    return asked


def stand_by() -> None:
    """Be a zygote again, which keeps no file open of the process that it serves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)


def use_zygote(line: socket.socket) -> None:
    """Let this process fork its commands, too."""
    forks.Popen.zygote = forks.Zygote(line)


def run(words: list[str], path: list[str]) -> None:
    """Run what Python would run with these arguments, and modules of this path."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    safe = words[0] == "-P"
    how, *words = words[1:] if words[0] in ("-P", "-u") else words
    first = {"-c": "", "-m": os.getcwd()}.get(how, os.path.dirname(os.path.abspath(how)))
    sys.path[:] = path if safe else [first, *path]
    if how == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *words[1:]]
        execute(words[0], ModuleType("__main__"), "<string>")
    else:
        sys.argv = [how, *words]
        module = ModuleType("__main__")
        module.__file__ = os.path.abspath(how)
        with open(how, "rb") as file:
            execute(file.read(), module, how)


def execute(source: str | bytes, module: ModuleType, name: str) -> None:
    """Run a program in the module `__main__`."""
    sys.modules["__main__"] = module
    exec(compile(source, name, "exec"), module.__dict__)


if __name__ == "__main__":
    main(int(sys.argv[1]))
