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

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Side:
    """Another engine, loaded and waiting for its turn."""

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
        sides = [stack.enter_context(_open("transformers", "transformers_side.py", python, job))]
        for mode in ("compiled", "eager") if vllm_python else ():
            asked = {**job, "k": k, "eager": mode == "eager"}
            side = _open(f"vllm {mode}", "vllm_side.py", vllm_python, asked)
            sides.append(stack.enter_context(side))
        yield sides


@contextmanager
def _open(name: str, script: str, python: Path, job: Mapping[str, Any]) -> Iterator[Side]:
    """Start one side's script and wait until it is warm; its output shows only if it fails."""
    print(f"{name}: starting", file=sys.stderr)
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as connection, tempfile.TemporaryFile("w+") as log:
        with theirs:
            process = subprocess.Popen(
                [python, HERE / script, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(python, job["threads"]),
            )
        try:
            connection.send(job)
            version = connection.recv()
            process.send_signal(signal.SIGSTOP)
            yield Side(
                Case(name, job.get("k", 0), 1, data=job["data"]), version, connection, process
            )
        except (EOFError, OSError):
            log.seek(0)
            raise SystemExit(f"{script} failed:\n{log.read()[-3000:]}") from None
        finally:
            process.kill()
            process.wait()


def _environment(python: Path, threads: int) -> dict[str, str]:
    """The same threads for both sides, and for vLLM the OpenMP library that it wants preloaded."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return {**variables, "LD_PRELOAD": str(openmp)} if openmp.exists() else variables
