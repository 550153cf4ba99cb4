"""A server over two engines, of which one is killed: what its clients and its metrics see."""

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process import Process
from prometheus_client.parser import text_string_to_metric_families
from test_routers import free_ports

from server_process import family

PATIENCE = 240.0
"""Seconds, far more than anything here takes on an idle machine."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")


@pytest.fixture
def process(forked: None) -> Iterator[Process]:
    running = Process(*free_ports(1), "--data-parallel-size", "2")
    running.wait()
    yield running
    running.process.kill()
    running.process.communicate()


def samples(process: Process, name: str, **labels: str) -> dict[str, float]:
    """A metric's sums by engine."""
    page = urllib.request.urlopen(f"{process.url}/metrics", timeout=PATIENCE).read().decode()
    found: dict[str, float] = {}
    for each in text_string_to_metric_families(page):
        for one in each.samples:
            if one.name == name and labels.items() <= one.labels.items():
                found[one.labels["engine"]] = found.get(one.labels["engine"], 0.0) + one.value
    return found


def engines(process: Process) -> list[int]:
    pids = family([process.process.pid]) - {process.process.pid}
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
    return sorted(pid for pid, line in lines.items() if "engine_client.child" in line)


def test_a_killed_engine_ends_only_its_streams_and_comes_back(process: Process):
    body = {"max_tokens": 300, "ignore_eos": True, "stream": True}
    answers = [process.post(body | {"prompt": text}) for text in ("a", "b", "c", "d")]
    for answer in answers:
        answer.readline()
    assert samples(process, "vllm:num_requests_running") == {"0": 2.0, "1": 2.0}
    ends: dict[int, bytes] = {}
    readers = [
        threading.Thread(target=lambda place=place, one=one: ends.update({place: one.read()}))
        for place, one in enumerate(answers)
    ]
    for reader in readers:
        reader.start()
    before = engines(process)
    os.kill(before[1], signal.SIGKILL)
    for reader in readers:
        reader.join(PATIENCE)
    lasts = [ends[place].strip().split(b"data: ")[-1] for place in range(4)]
    told: list[Any] = [json.loads(last)["error"] for last in lasts if last != b"[DONE]"]
    assert len(told) == 2, "the other two came to their ends"
    for error in told:
        assert (error["code"], error["type"]) == (503, "service_unavailable_error")
        assert error["message"] == "the engine of this request ended; try again"
    assert process.get("/health") == process.get("/ready") == 200
    end = time.monotonic() + PATIENCE
    while samples(process, "peagle:engine_responds") != {"0": 1.0, "1": 1.0}:
        assert time.monotonic() < end
        time.sleep(0.1)
    now = engines(process)
    assert len(now) == 2
    assert len({*now} & {*before}) == 1
    assert process.text() == process.text()
    assert samples(process, "vllm:request_success_total", finished_reason="error") in (
        {"0": 2.0, "1": 0.0},
        {"0": 0.0, "1": 2.0},
    )
    assert samples(process, "vllm:request_success_total") == {"0": 3.0, "1": 3.0}
