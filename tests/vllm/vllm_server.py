"""The bundled pair served by `peagle serve`: by our engine, or by real vLLM."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plain_drafter import plain_drafter

from peagle.pair import bundled

PYTHON = Path(os.environ.get("PEAGLE_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
K, START_SECONDS = 7, 600
SIZES = ["--max-model-len", "512", "--max-num-seqs", "2", "--served-model-name", "demo"]
SAME = ["--dtype", "float32", "--no-enable-prefix-caching"]
OURS = ["--draft-length", "fixed"]
VLLMS_OWN = ["--engine", "vllm", "--enforce-eager"]


@contextmanager
def our_server(place: Path) -> Iterator[str]:
    """The URL of our server."""
    with _running(OURS, dict(os.environ), place, "ours.log") as url:
        yield url


@contextmanager
def vllm_server(place: Path) -> Iterator[str]:
    """The URL of vLLM's."""
    openmp = PYTHON.parents[1] / "lib" / "libiomp5.so"
    given = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LD_PRELOAD": str(openmp) if openmp.exists() else "",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_name_package(place)), given))),
    }
    with _running(VLLMS_OWN, environment, place, "vllm.log") as url:
        yield url


@contextmanager
def _running(
    flags: Sequence[str], environment: dict[str, str], place: Path, name: str
) -> Iterator[str]:
    log = place / name
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "method": "eagle3",
        "model": str(plain_drafter("peagle", place)),
        "num_speculative_tokens": K,
        "parallel_drafting": True,
    }
    command = [sys.executable, "-m", "peagle", "serve", str(bundled("target")), *flags]
    command += ["--port", str(port), "--speculative-config", json.dumps(config), *SIZES, *SAME]
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _name_package(place: Path) -> Path:
    """The build for CPUs is called vllm-cpu, and its own command asks for the version of vllm."""
    metadata = place / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return place


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers; what it printed when it does not."""
    end = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(1)
