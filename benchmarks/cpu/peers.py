"""transformers and vLLM on the same work, each in its own process, run round by round."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """What another engine measured."""

    name: str
    version: str
    k: int
    """Tokens drafted by the P-EAGLE drafter; 0 is no speculation."""
    otps: float
    """Output tokens per second, the median round."""
    identical_prompts: int
    """Prompts whose output equals ours without speculation."""


@dataclass(frozen=True)
class Side:
    """Another engine, loaded and waiting."""

    name: str
    k: int
    version: str
    connection: Connection
    process: subprocess.Popen[bytes]

    def run(self) -> tuple[float, list[list[int]]]:
        """Complete all prompts once: seconds and outputs. The process is stopped between runs."""
        self.process.send_signal(signal.SIGCONT)
        self.connection.send("run")
        seconds, outputs = self.connection.recv()
        self.process.send_signal(signal.SIGSTOP)
        return seconds, outputs


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


def median_peer(
    side: Side, rounds: Sequence[tuple[float, list[list[int]]]], expected: Sequence[Sequence[int]]
) -> Peer:
    """A side's median round, compared with our own outputs without speculation."""
    seconds, outputs = sorted(rounds, key=lambda one: one[0])[len(rounds) // 2]
    same = sum(list(ours) == theirs for ours, theirs in zip(expected, outputs, strict=True))
    tokens = sum(len(output) for output in outputs)
    return Peer(side.name, side.version, side.k, tokens / seconds, same)


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
            yield Side(name, job.get("k", 0), version, connection, process)
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
