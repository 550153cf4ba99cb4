"""vLLM's side of `mixed.py`, in vLLM's own environment: `mixed_peer.py JOB.json RESULT.json`."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_peer import generate, open_llm


def main(job_file: str, result_file: str) -> None:
    """Run a job's lists twice over, so that kernels tuned on the way do not count."""
    job = json.loads(Path(job_file).read_text())
    with tempfile.TemporaryDirectory() as scratch:
        llm = open_llm(job, Path(scratch))
        for asked in job["lists"]:
            generate(llm, asked)
        _, *counted = job["lists"]
        Path(result_file).write_text(json.dumps([speed(llm, asked) for asked in counted]))


def speed(llm: Any, asked: list[tuple[list[int], int]]) -> float:
    """Output tokens per second of one list."""
    start = time.perf_counter()
    tokens = generate(llm, asked)
    return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
