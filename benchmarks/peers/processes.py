"""Both sides as processes: one at a time, with a time limit, until the card's memory is free."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import peagle
from peagle.bench.shapes import shape_of
from peagle.errors import InputError
from peers import card
from peers.job import Gate, Job
from peers.trials import Trial, Work, bench_flags, peer_job
from records.bench import run_of
from records.result import Process, Run

BENCHMARKS = Path(__file__).parents[1]
SIDE = "peers.vllm_side"
"""The module that vLLM's interpreter runs."""
CHECKPOINT = BENCHMARKS / "checkpoint.py"
LAST_LINES = 25
CHOICE = re.compile(r"\[\S+:\d+\] ((?:Using|Selected) .*)")
"""A line of vLLM's log that says what it chose."""
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process like ours, without sockets
}
"""vLLM's environment."""


@dataclass(frozen=True)
class Vllm:
    """Where vLLM is: an interpreter, and a directory of packages that come before its own."""

    python: Path
    path: Path | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of its engine."""

    def environment(self) -> dict[str, str]:
        """vLLM's packages come first, then ours, whose shapes and prompts its side uses."""
        given = os.environ.get("PYTHONPATH")
        places = (self.path, Path(peagle.__file__).parents[1], BENCHMARKS, given)
        path = os.pathsep.join(str(place) for place in places if place)
        return {**os.environ, **SETTINGS, "PYTHONPATH": path}

    def command(self, job: Job, scratch: Path) -> tuple[list[str], Path]:
        """What does a job, and the file of its result. scratch: a directory for both."""
        given, result = scratch / "job.json", scratch / "result.json"
        job.write(given)
        return [str(self.python), "-m", SIDE, str(given), str(result)], result

    def outputs(self, job: Job, timeout: float) -> list[list[int]]:
        """The outputs of a job with prompts; exits with the last lines if it fails."""
        with tempfile.TemporaryDirectory() as scratch:
            command, result = self.command(job, Path(scratch))
            ended = run(command, self.environment(), timeout)
            if ended.failure:
                sys.exit(f"vLLM failed: {ended.failure}")
            found: list[list[int]] = json.loads(result.read_text())
            return found

    def found(self) -> bool:
        """Whether that interpreter finds vLLM."""
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        return not run([str(self.python), "-c", find], self.environment(), 60).failure


def routing_of(shape: str, work: Work) -> str | None:
    """How alike rows choose experts in a shape's target that is written for some work."""
    return shape_of(shape).weights.routed(work.routing).routing


def target_in(place: Path, shape: str, work: Work, timeout: float) -> Path:
    """The directory of a shape's target among those in a place; it is written if it is not there.

    Raises `InputError` if it cannot be.
    """
    pair = place / f"{shape}-{routing_of(shape, work) or 'plain'}"
    if pair.exists():
        return pair / "target"
    place.mkdir(parents=True, exist_ok=True)
    asked = ["--shape", shape, "--dtype", work.dtype, "--no-drafter"]
    asked += ["--routing", work.routing] if work.routing else []
    with tempfile.TemporaryDirectory(dir=place) as scratch:  # nothing of half a target stays
        written = Path(scratch) / "pair"
        command = [sys.executable, str(CHECKPOINT), *asked, "--out", str(written)]
        ended = run(command, os.environ, timeout)
        if ended.failure:
            raise InputError(f"the target of {shape} was not written: {ended.failure}")
        written.rename(pair)
    return pair / "target"


@dataclass(frozen=True)
class Attempt:
    """What one process measured, and what it told."""

    process: Process
    runs: tuple[Run, ...]
    versions: Mapping[str, str]


def attempt(
    trial: Trial, work: Work, vllm: Vllm, timeout: float, checkpoint: Path | None = None
) -> Attempt:
    """Run a trial, and keep what it measured, or the last lines if it failed.

    checkpoint: the target that is read; None: each side makes its own.
    """
    before = card.reading()
    with beginning(trial, work, vllm, checkpoint) as begun:
        done = begun.end(timeout, before)
    if card.freed(float(before.get("memory.used", 0))):
        return done
    failure = f"{done.process.failure or ''}\nthe card's memory was not given back".strip()
    return replace(done, process=replace(done.process, failure=failure))


@dataclass(frozen=True)
class Begun:
    """A trial whose process runs."""

    trial: Trial
    running: "Running"
    result: Path
    gate: Gate
    """At which vLLM waits, if it was told to."""
    start: float = field(default_factory=time.monotonic)

    @property
    def waits(self) -> bool:
        """Whether it waits at its gate, or will never do so."""
        return self.gate.ready or self.running.ended

    def refuse(self, seconds: float) -> None:
        """End a process that is not ready after so many seconds."""
        if not self.waits:
            self.running.refuse(f"not ready after {seconds:g} s")

    def end(self, timeout: float, before: dict[str, str | float]) -> Attempt:
        """Let the process measure and end. before: the card's reading."""
        self.gate.open()
        ended = self.running.end(timeout)
        told = json.loads(self.result.read_text()) if self.result.exists() else {"runs": []}
        trial, about = self.trial, told.get("environment", {})
        process = Process(
            **_named(trial),
            concurrencies=trial.concurrencies,
            seconds=round(time.monotonic() - self.start, 1),
            start_seconds=about.get("start_seconds"),
            chosen=tuple(choices(ended.log)) if trial.side == "vllm" else (),
            resolved=about.get("resolved", {}),
            card_before=before,
            failure=ended.failure,
        )
        given = _named(trial) | {"given_acceptance": trial.given_acceptance}
        runs = tuple(run_of(one, **given) for one in told["runs"])
        return Attempt(process, runs, about.get("versions", {}))


@contextmanager
def beginning(
    trial: Trial, work: Work, vllm: Vllm, checkpoint: Path | None, waits: bool = False
) -> Iterator[Begun]:
    """A trial's process, of which nothing is left afterwards. waits: at its gate, once ready."""
    with tempfile.TemporaryDirectory() as scratch:
        gate = Path(scratch) if waits else None
        command, environment, result = _command(trial, work, vllm, Path(scratch), checkpoint, gate)
        with Running(command, environment) as running:
            yield Begun(trial, running, result, Gate(Path(scratch)))


def _named(trial: Trial) -> dict[str, Any]:
    """What a trial's process and its runs have in common."""
    match = trial.match
    return {
        "side": trial.side,
        "setting": trial.setting,
        "data": match.shape,
        "method": match.method,
        "k": match.k,
        "draft_length": trial.draft_length,
    }


def _command(
    trial: Trial,
    work: Work,
    vllm: Vllm,
    scratch: Path,
    checkpoint: Path | None,
    gate: Path | None,
) -> tuple[list[str], Mapping[str, str], Path]:
    """A trial's command, its environment, and the file of its result."""
    if trial.side == "peagle":
        result = scratch / "result.json"
        flags = bench_flags(trial, work, str(result), checkpoint)
        return [sys.executable, "-m", "peagle", *flags], os.environ, result
    job = peer_job(trial, work, checkpoint, vllm.engine_args, gate)
    command, result = vllm.command(job, scratch)
    return command, vllm.environment(), result


def choices(log: str) -> list[str]:
    """What vLLM's log says that it chose: kernels and backends, each once."""
    found = dict.fromkeys(CHOICE.findall(log))
    return [line for line in found if " /" not in line]  # those say where files are


@dataclass(frozen=True)
class Ended:
    """A command that ran to its end."""

    failure: str | None
    """Why it failed and its last lines; None: it did not."""
    log: str = ""
    """All that it printed."""


class Running:
    """A command in its own process group, of which nothing is left after the block."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed below)
        self._process: subprocess.Popen[bytes] | None = None
        self._reason: str | None = None
        self._killed = False
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._reason = f"{command[0]} cannot be started: {error.strerror}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._log.close()

    @property
    def ended(self) -> bool:
        """Whether it runs no more."""
        return self._process is None or self._process.poll() is not None

    def refuse(self, reason: str) -> None:
        """End it for a reason."""
        self._kill()
        self._reason = reason

    def end(self, timeout: float) -> Ended:
        """Wait until it ends, at most so long."""
        if self._process is None:
            return Ended(self._reason)
        reason = self._reason or self._wait(self._process, timeout)
        self._log.seek(0)
        text = self._log.read()
        return Ended(None if reason is None else "\n".join([reason, *_last_lines(text)]), text)

    def _wait(self, process: subprocess.Popen[bytes], timeout: float) -> str | None:
        """Wait for the process, then end what is left of its group; returns why it failed."""
        try:
            status = process.wait(timeout)
            return f"exit status {status}" if status else None
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:g} s"
        finally:
            self._kill()

    def _kill(self) -> None:
        """End the group, once: its number may be another's later."""
        if self._process is not None and not self._killed:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._killed = True


def run(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Ended:
    """Run a command to its end; nothing of its process group is left."""
    with Running(command, environment) as running:
        return running.end(timeout)


def _last_lines(text: str) -> list[str]:
    return [line[:300] for line in text.splitlines() if line.strip()][-LAST_LINES:]
