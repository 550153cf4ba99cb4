"""transformers and vLLM on the same work, each in a process of its own."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """Output tokens per second, the best round."""
    identical_prompts: int
    """Prompts whose output equals ours without speculation."""


def run_peers(
    job: Mapping[str, Any],
    ks: Sequence[int],
    vllm_python: Path | None,
    expected: Sequence[Sequence[int]],
) -> Iterator[Peer]:
    """transformers without speculation; vLLM with the drafter at each K, compiled and eager."""
    python = Path(sys.executable)
    yield _peer("transformers", 0, _run("transformers_side.py", python, job), expected)
    if vllm_python is None:
        return
    for k, eager in itertools.product(ks, (False, True)):
        result = _run("vllm_side.py", vllm_python, {**job, "k": k, "eager": eager})
        yield _peer("vllm eager" if eager else "vllm compiled", k, result, expected)


def _run(script: str, python: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one side's script; what it prints is shown only when it fails."""
    print(script, *(f"{key}={job[key]}" for key in ("k", "eager") if key in job), file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        job_file, result_file = Path(scratch) / "job.json", Path(scratch) / "result.json"
        job_file.write_text(json.dumps(job))
        done = subprocess.run(
            [python, HERE / script, job_file, result_file],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(python, job["threads"]),
        )
        if done.returncode:
            raise SystemExit(f"{script} failed:\n{done.stdout[-3000:]}")
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


def _environment(python: Path, threads: int) -> dict[str, str]:
    """Both sides get the same threads, and vLLM the OpenMP library that it asks to be preloaded."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    return {**variables, "LD_PRELOAD": str(openmp)} if openmp.exists() else variables


def _peer(name: str, k: int, result: Mapping[str, Any], expected: Sequence[Sequence[int]]) -> Peer:
    outputs = result["outputs"]
    same = sum(list(ours) == theirs for ours, theirs in zip(expected, outputs, strict=True))
    tokens = sum(len(output) for output in outputs)
    return Peer(name, result["version"], k, tokens / min(result["seconds"]), same)
