"""Both sides as processes: one at a time, with a time limit, until the card's memory is free."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import card
from matches import Trial, Work, bench_flags, peer_job

import peagle
from peagle.bench.shapes import shape_of
from peagle.errors import InputError

PEER = Path(__file__).parent / "vllm_peer.py"
CHECKPOINT = Path(__file__).parent / "checkpoint.py"
RESULT = "result.json"
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

    def environment(self) -> dict[str, str]:
        """vLLM's packages come first, then ours, whose shapes and prompts its side uses."""
        ours = Path(peagle.__file__).parents[1]
        given = os.environ.get("PYTHONPATH")
        places = [str(place) for place in (self.path, ours, given) if place]
        return {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(places)}

    def answer(self, peer: Path, job: Mapping[str, Any], timeout: float) -> Any:
        """The result that a script writes for a job; exits with the last lines if it fails."""
        with tempfile.TemporaryDirectory() as scratch:
            given, result = Path(scratch) / "job.json", Path(scratch) / "result.json"
            given.write_text(json.dumps(job))
            command = [str(self.python), str(peer), str(given), str(result)]
            ended = run(command, self.environment(), timeout)
            if ended.failure:
                sys.exit(f"vLLM failed: {ended.failure}")
            return json.loads(result.read_text())

    def found(self) -> bool:
        """Whether that interpreter finds vLLM."""
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        command = [str(self.python), "-c", find]
        return not run(command, self.environment(), 60).failure


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


def attempt(
    trial: Trial, work: Work, vllm: Vllm, timeout: float, checkpoint: Path | None = None
) -> dict[str, Any]:
    """Run a trial and record what it measured, or the last lines if it failed.

    checkpoint: the target that is read; None: each side makes its own.
    """
    before = card.reading()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / RESULT
        ended = run(*_command(trial, work, vllm, Path(scratch), checkpoint), timeout)
        measured = json.loads(result.read_text()) if result.exists() else {"runs": []}
    seconds, failure = round(time.monotonic() - start, 1), ended.failure
    if not card.freed(before.get("memory.used", 0)):
        failure = f"{failure or ''}\nthe card's memory was not given back".strip()
    asked = {name: value for name, value in vars(trial).items() if name != "match"}
    found = {"seconds": seconds, "card_before": before, "failure": failure, **measured}
    if trial.side == "vllm":
        found["choices"] = choices(ended.log)
    if checkpoint is not None:  # which does not say it
        found["routing"] = routing_of(trial.match.shape, work)
    return {**asked, **vars(trial.match), "checkpoint": checkpoint is not None, **found}


def _command(
    trial: Trial, work: Work, vllm: Vllm, scratch: Path, checkpoint: Path | None
) -> tuple[list[str], Mapping[str, str]]:
    result = scratch / RESULT
    if trial.side == "peagle":
        flags = bench_flags(trial, work, str(result), checkpoint)
        return [sys.executable, "-m", "peagle", *flags], os.environ
    job = scratch / "job.json"
    job.write_text(json.dumps(peer_job(trial, work, checkpoint)))
    return [str(vllm.python), str(PEER), str(job), str(result)], vllm.environment()


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


def run(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Ended:
    """Run a command to its end.

    It gets its own process group, of which nothing is left when this returns.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Ended(f"{command[0]} cannot be started: {error.strerror}")
        reason = _wait(process, timeout)
        log.seek(0)
        text = log.read()
    return Ended(None if reason is None else "\n".join([reason, *_last_lines(text)]), text)


def _wait(process: subprocess.Popen[bytes], timeout: float) -> str | None:
    """Wait for a process, then end what is left of its group; returns why it failed."""
    try:
        status = process.wait(timeout)
        return f"exit status {status}" if status else None
    except subprocess.TimeoutExpired:
        return f"not done after {timeout:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_lines(text: str) -> list[str]:
    return [line[:300] for line in text.splitlines() if line.strip()][-LAST_LINES:]
