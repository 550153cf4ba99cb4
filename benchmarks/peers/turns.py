"""transformers and vLLM on the same work, each in its own process, run round by round."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from peagle.bench.case import Case
from peagle.bench.measures import NOT_MEASURED, measured
from peagle.bench.runs import Run

SIDE = Path(__file__).with_name("turns_side.py")


@dataclass(frozen=True)
class Side:
    """Another engine, loaded and waiting for its turn."""

    engine: str
    setting: str
    """How it was started, where it can be in several ways."""
    case: Case
    version: str
    connection: Connection
    process: subprocess.Popen[bytes]

    def run(self, on_finish: Callable[[], None] = lambda: None) -> Run:
        """Complete all prompts once. The process is stopped between runs.

        A request's tokens are all timed at its end: the time to the first one is not measured.
        """
        self.process.send_signal(signal.SIGCONT)
        self.connection.send("run")
        answers = self.connection.recv()
        self.process.send_signal(signal.SIGSTOP)
        for _ in answers:
            on_finish()
        times = [(seconds,) * len(output) for seconds, output in answers]
        found = measured(times, None, sum(seconds for seconds, _ in answers))
        found = replace(found, ttft_ms=NOT_MEASURED)
        return Run(self.case, found, tuple(tuple(output) for _, output in answers))


@contextmanager
def open_sides(job: Mapping[str, Any], k: int, vllm_python: Path | None) -> Iterator[list[Side]]:
    """transformers without speculation; vLLM with the drafter at `k`, compiled and eager."""
    with ExitStack() as stack:
        python = Path(sys.executable)
        sides = [stack.enter_context(_open("transformers", "", python, job))]
        for mode in ("compiled", "eager") if vllm_python else ():
            asked = {**job, "k": k, "eager": mode == "eager"}
            side = _open("vllm", mode, Path(str(vllm_python)), asked)
            sides.append(stack.enter_context(side))
        yield sides


@contextmanager
def _open(engine: str, setting: str, python: Path, job: Mapping[str, Any]) -> Iterator[Side]:
    """Start one side and wait until it is warm; its output shows only if it fails."""
    name = f"{engine} {setting}".strip()
    print(f"{name}: starting", file=sys.stderr)
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as connection, tempfile.TemporaryFile("w+") as log:
        with theirs:
            process = subprocess.Popen(
                [python, SIDE, engine, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(python, job["threads"]),
            )
        try:
            connection.send(job)
            version = connection.recv()
            process.send_signal(signal.SIGSTOP)
            case = Case(name, job.get("k", 0), 1, data=job["data"])
            yield Side(engine, setting, case, version, connection, process)
        except (EOFError, OSError):
            log.seek(0)
            raise SystemExit(f"{name} failed:\n{log.read()[-3000:]}") from None
        finally:
            process.kill()
            process.wait()


def _environment(python: Path, threads: int) -> dict[str, str]:
    """The same threads for both sides, and for vLLM the OpenMP library that it wants preloaded."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return {**variables, "LD_PRELOAD": str(openmp)} if openmp.exists() else variables
