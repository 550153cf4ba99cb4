"""A server whose engine has a process of its own, as on a GPU: what ends with what."""

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process import Process
from stuck_child import STUCK

from peagle.cli.loading import wants_own_process
from peagle.config import EngineConfig
from peagle.pair import bundled
from server_process import family

AS_ON_A_GPU = """
import sys
from unittest import mock
from peagle.__main__ import main
with mock.patch("peagle.cli.loading.wants_own_process", return_value=True):
    sys.exit(main())
"""
WITH_A_STUCK_CHILD = f"""
import sys
from unittest import mock
sys.path.insert(0, {str(Path(__file__).parent)!r})
mock.patch("peagle.engine_client.process.CHILD", "stuck_child").start()
mock.patch("peagle.engine_client.process.SILENCE", 3.0).start()
{AS_ON_A_GPU}"""
"""And one whose engine keeps its interpreter when asked to, and must not be silent for long."""
LONG = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
PATIENCE = 240.0
"""Seconds, far more than anything here takes on an idle machine."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")


@pytest.fixture
def code() -> str:
    """What starts the server."""
    return AS_ON_A_GPU


@pytest.fixture
def process(forked: None, code: str) -> Iterator[Process]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running = Process(port, "--log-format", "json", module=("-c", code))
    running.wait()
    yield running
    running.process.kill()
    running.process.wait()


def engine_of(process: Process) -> int:
    """The id of the engine's process; another child tries forms."""
    children = family([process.process.pid]) - {process.process.pid}
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    [child] = [pid for pid, line in lines.items() if "child" in line]
    return child


def runs(pid: int) -> bool:
    """Whether a process exists, and is not only waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it ended
        return False
    return state != "Z"


def wait_for_end(pid: int) -> None:
    end = time.monotonic() + PATIENCE
    while runs(pid):
        assert time.monotonic() < end, "the engine outlives its server"
        time.sleep(0.02)


def test_it_drains_and_its_engine_goes_on_meanwhile(process: Process):
    """Also where a terminal or a supervisor sends the signal to both."""
    engine = engine_of(process)
    assert process.text()
    answer = process.post(LONG | {"max_tokens": 300})
    answer.readline()
    assert process.get("/metrics") == 200
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine, number)
    process.process.send_signal(signal.SIGTERM)
    assert answer.read().rstrip().endswith(b"data: [DONE]")
    _, errors = process.process.communicate(timeout=PATIENCE)
    assert process.process.returncode == 0
    assert "Traceback" not in errors
    assert not runs(engine)


def test_an_engine_ends_with_its_server(process: Process):
    engine = engine_of(process)
    process.post(LONG).readline()
    process.process.kill()
    process.process.wait()
    wait_for_end(engine)


@pytest.fixture
def free_before() -> int:
    """Bytes of the GPU that are free before a server starts."""
    return torch.cuda.mem_get_info()[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_killed_server_gives_its_memory_of_the_gpu_back(free_before: int, process: Process):
    """Within five seconds; nothing else may use the GPU meanwhile."""
    process.post(LONG).readline()
    assert free_before - torch.cuda.mem_get_info()[0] > 2**30, "it holds memory"
    process.process.kill()
    end = time.monotonic() + 5.0
    while free_before - torch.cuda.mem_get_info()[0] > 2**26:
        assert time.monotonic() < end, "its engine's memory is not back"
        time.sleep(0.02)


def test_a_server_ends_with_its_engine_and_says_why(process: Process):
    """All streams are told."""
    answers = [process.post(LONG) for _ in range(3)]
    for answer in answers:
        answer.readline()
    ends: list[bytes] = []
    readers = [threading.Thread(target=lambda a=a: ends.append(a.read())) for a in answers]
    for reader in readers:
        reader.start()
    os.kill(engine_of(process), signal.SIGKILL)
    for reader in readers:
        reader.join(PATIENCE)
    assert len(ends) == 3
    for end in ends:
        last = end.strip().split(b"data: ")[-1]
        error = json.loads(last)["error"]
        assert error["type"] == "service_unavailable_error"
        assert "the engine failed" in error["message"], "nobody shut it down"
    _, errors = process.process.communicate(timeout=PATIENCE)
    assert process.process.returncode == 1
    assert "the engine's process ended: killed by SIGKILL" in errors


def stop_and_fill(process: Process) -> list[Any]:
    """Stop the engine, and send it more than its socket holds."""
    os.kill(engine_of(process), signal.SIGSTOP)
    return [process.post(LONG | {"prompt": [999] * 1000}) for _ in range(200)]


def keep_the_interpreter(process: Process) -> list[Any]:
    return [process.post(LONG | {"prompt": [STUCK, 5]})]


@pytest.mark.parametrize("code", [WITH_A_STUCK_CHILD])
@pytest.mark.parametrize("break_it", [stop_and_fill, keep_the_interpreter])
def test_a_stuck_engine_is_told_and_ended(
    break_it: Callable[[Process], list[Any]], process: Process
):
    """Its streams get an error, and a signal ends both processes, whatever the engine does."""
    engine = engine_of(process)
    answers = [process.post(LONG)]
    answers[0].readline()
    answers += break_it(process)
    process.wait(status=503)
    assert process.get("/ready") == 503
    with pytest.raises(urllib.error.HTTPError, match="503"):
        process.post(LONG)
    metrics = urllib.request.urlopen(f"{process.url}/metrics", timeout=PATIENCE).read().decode()
    [age] = [line for line in metrics.splitlines() if line.startswith("peagle:step_age_seconds{")]
    assert float(age.split()[1]) > 3.0
    process.process.send_signal(signal.SIGTERM)
    for answer in answers:
        last = answer.read().strip().split(b"data: ")[-1]
        assert json.loads(last)["error"]["type"] == "service_unavailable_error"
    process.process.communicate(timeout=PATIENCE)
    assert not runs(engine)


@pytest.mark.parametrize("gpu", [True, False])
def test_only_an_engine_on_a_gpu_has_its_own(gpu: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert wants_own_process(EngineConfig()) == gpu
    assert not wants_own_process(EngineConfig(device="cpu"))


@pytest.mark.usefixtures("forked")
def test_what_cannot_be_loaded_ends_in_one_line():
    """As the engine's process found out."""
    target = str(bundled("target"))
    failed = Process(0, target, "--drafter", target, module=("-c", AS_ON_A_GPU))
    _, errors = failed.process.communicate(timeout=2 * PATIENCE)
    assert failed.process.returncode == 2
    [line] = errors.splitlines()
    assert line.startswith(f"peagle: {target}")
