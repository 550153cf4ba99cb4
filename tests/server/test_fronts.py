"""A server of two processes in front of one engine: as one, and how it ends."""

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process import BODY, Process
from prometheus_client.parser import text_string_to_metric_families
from test_own_process import wait_for_end
from test_run import WITH_TIME

from peagle import LLM, SamplingParams
from server_process import family

PATIENCE = 240.0
"""Seconds, far more than anything here takes on an idle machine."""
LONG = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
SHORT = LONG | {"max_tokens": 300}
HEADERS = {"Content-Type": "application/json"}
FLAGS = ("--log-format", "json", "--drain-seconds", "240", "--api-server-count", "2")

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")


class Fronts(Process):
    """A server, and a connection to each of its processes."""

    def __init__(self, *flags: str, program: str = WITH_TIME) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        super().__init__(self.port, *FLAGS, *flags, module=("-c", program))
        self.wait()
        wait_until(lambda: len(self.forks()) == 2)
        self.pids = self.forks()
        self.connections = [self.connect(pid)[0] for pid in self.pids]

    def connect(self, pid: int) -> tuple[http.client.HTTPConnection, int]:
        """A connection to one of the processes, and its health."""
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            if has_connection_from(pid, connection, self.port):
                return connection, answer.status

    def members(self) -> set[int]:
        """All processes of the server."""
        return family([self.process.pid])

    def forks(self) -> list[int]:
        """Those with the command line of the one that was started."""
        first = self.process.pid
        return sorted(one for one in self.members() - {first} if command(one) == command(first))

    @property
    def engine(self) -> int:
        """The id of the engine's process."""
        [pid] = [pid for pid in self.members() if "engine_client.child" in command(pid)]
        return pid

    def ask(self, front: int, body: dict[str, Any]) -> http.client.HTTPResponse:
        """The open answer of the first or the second process."""
        self.connections[front].request("POST", "/v1/completions", json.dumps(body), HEADERS)
        return self.connections[front].getresponse()

    def scrape(self, front: int) -> dict[str, float]:
        """The sum of each metric's samples, as one of the processes tells it."""
        self.connections[front].request("GET", "/metrics")
        page = self.connections[front].getresponse().read().decode()
        sums: dict[str, float] = {}
        for each in text_string_to_metric_families(page):
            for one in each.samples:
                sums[one.name] = sums.get(one.name, 0.0) + one.value
        return sums

    def streams(self, body: dict[str, Any]) -> list[http.client.HTTPResponse]:
        """One from each process, which has begun."""
        answers = [self.ask(front, body) for front in (0, 1)]
        for answer in answers:
            assert answer.readline().startswith(b"data: ")
        return answers


def command(pid: int) -> str:
    """The command line of a process; nothing if it ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def has_connection_from(pid: int, connection: http.client.HTTPConnection, port: int) -> bool:
    """Whether a process has the other end of a connection to a port."""
    ours = connection.sock.getsockname()[1]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    [inode] = [
        row[9] for row in rows if (row[1][-4:], row[2][-4:]) == (f"{port:04X}", f"{ours:04X}")
    ]
    return any(target(one) == f"socket:[{inode}]" for one in Path(f"/proc/{pid}/fd").iterdir())


def target(link: Path) -> str:
    """What an open file is; nothing if it was closed."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def last_event(rest: bytes) -> Any:
    return json.loads(rest.strip().split(b"data: ")[-1])


def wait_until(true: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def flags() -> tuple[str, ...]:
    return ()


@pytest.fixture
def fronts(forked: None, flags: tuple[str, ...]) -> Iterator[Fronts]:
    running = Fronts(*flags)
    members = running.members()
    yield running
    running.process.kill()
    running.process.communicate()
    for pid in members:
        wait_for_end(pid)


@pytest.mark.parametrize("flags", [("--dtype", "float32", "--seed", "5")])
def test_both_answer_as_one_would(fronts: Fronts, offline: LLM):
    """In text, seeds and metrics."""
    drawn = BODY | {"temperature": 0.8, "return_metrics": True}
    for number, front in enumerate((0, 1, 1, 0)):
        params = SamplingParams(max_tokens=12, temperature=0.8, seed=5 + number)
        [wanted] = offline.generate([str(BODY["prompt"])], params)
        [choice] = json.load(fronts.ask(front, drawn))["choices"]
        assert (choice["text"], choice["metrics"]["seed"]) == (wanted.text, 5 + number)
    for front in (0, 1):
        wait_until(lambda front=front: fronts.scrape(front)["vllm:request_success_total"] == 4)
    one, other = fronts.scrape(0), fronts.scrape(1)
    for name in ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"):
        assert one[name] == other[name] > 0
    prompt = len(offline.tokenize(str(BODY["prompt"])))
    for front in (0, 1):  # the engine's counts come once
        wait_until(lambda front=front: queries(fronts, front) == 4 * prompt)


def queries(fronts: Fronts, front: int) -> float:
    return fronts.scrape(front)["vllm:prefix_cache_queries_total"]


@pytest.mark.parametrize("flags", [("--max-num-seqs", "1", "--max-queue", "0")])
def test_the_queue_is_that_of_all(fronts: Fronts):
    answer = fronts.ask(0, LONG)
    assert answer.readline()
    refused = fronts.ask(1, LONG)
    assert refused.status == 429
    refused.read()
    wait_until(lambda: fronts.scrape(1)["vllm:num_requests_running"] == 1)
    fronts.connections[0].close()
    answer.close()
    wait_until(lambda: has_room(fronts))


def has_room(fronts: Fronts) -> bool:
    answer = fronts.ask(1, BODY)
    answer.read()
    return answer.status == 200


def test_a_signal_lets_the_streams_of_both_finish(fronts: Fronts):
    """Also where a terminal or a supervisor sends it to all."""
    streams = fronts.streams(SHORT)
    for pid in (*fronts.pids, fronts.engine, fronts.process.pid):
        os.kill(pid, signal.SIGTERM)
    for stream in streams:
        assert stream.read().rstrip().endswith(b"data: [DONE]")
    _, errors = fronts.process.communicate(timeout=PATIENCE)
    assert fronts.process.returncode == 0
    assert "Traceback" not in errors


def test_a_second_signal_tells_the_clients_of_both(fronts: Fronts):
    streams = fronts.streams(LONG)
    fronts.process.send_signal(signal.SIGINT)
    for pid in fronts.pids:
        wait_until(lambda pid=pid: fronts.connect(pid)[1] == 503)
    fronts.process.send_signal(signal.SIGINT)
    for stream in streams:
        assert last_event(stream.read())["error"]["message"] == "the server is shutting down"
    fronts.process.communicate(timeout=PATIENCE)
    assert fronts.process.returncode == 0


@pytest.mark.usefixtures("forked")
def test_a_second_signal_ends_one_that_is_stopped():
    fronts = Fronts(program=WITH_TIME.replace("60.0", "0.1"))
    os.kill(fronts.pids[1], signal.SIGSTOP)
    fronts.process.send_signal(signal.SIGTERM)
    wait_for_end(fronts.pids[0])
    fronts.process.send_signal(signal.SIGTERM)
    fronts.process.communicate(timeout=PATIENCE)
    assert fronts.process.returncode == 1
    wait_for_end(fronts.pids[1])


def test_a_server_ends_with_one_of_its_processes(fronts: Fronts):
    """The streams of the other one come to their ends."""
    streams = fronts.streams(SHORT)
    os.kill(fronts.pids[0], signal.SIGKILL)
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        streams[0].read()
    assert streams[1].read().rstrip().endswith(b"data: [DONE]")
    _, errors = fronts.process.communicate(timeout=PATIENCE)
    assert fronts.process.returncode == 1
    assert "a process in front ended with code -9" in errors


def test_a_server_ends_with_its_engine(fronts: Fronts):
    streams = fronts.streams(LONG)
    os.kill(fronts.engine, signal.SIGKILL)
    for stream in streams:
        assert "the engine failed" in last_event(stream.read())["error"]["message"]
    _, errors = fronts.process.communicate(timeout=PATIENCE)
    assert fronts.process.returncode == 1
    assert "the engine's process ended: killed by SIGKILL" in errors


def test_all_end_with_the_one_that_was_started(fronts: Fronts):
    """As the fixture waits for."""
    fronts.streams(LONG)
    fronts.process.kill()


@pytest.mark.usefixtures("forked")
def test_one_engine_alone_has_several_processes_in_front():
    failed = Process(0, "--api-server-count", "2", "--data-parallel-size", "2")
    _, errors = failed.process.communicate(timeout=PATIENCE)
    assert failed.process.returncode == 2
    assert errors == "peagle: --api-server-count above 1: on Linux alone, and for one engine\n"


@pytest.mark.usefixtures("forked")
def test_a_port_that_others_share_is_told_before_loading():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        failed = Process(other.getsockname()[1], "--api-server-count", "2")
        _, errors = failed.process.communicate(timeout=PATIENCE)
    assert failed.process.returncode == 2
    assert "Address already in use" in errors
