"""Servers that are started: their ports, their ends, and what those say that do not start."""

import glob
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peagle.errors import InputError
from server_process import family, started

LISTENS = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("begins", flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def test_a_server_is_ready_and_nothing_of_it_is_left(tmp_path: Path):
    log = tmp_path / "log"
    with started([sys.executable, "-c", LISTENS], log) as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert server.root.port == server.port
        assert server.start_seconds > 0.0
        members = family([server.pid])
        assert len(members) == 2
    assert log.read_text() == "begins\n"
    end = time.monotonic() + 120
    while family(members) and time.monotonic() < end:  # its child is another's to wait for
        time.sleep(0.05)
    assert not family(members)
    with pytest.raises(OSError):  # noqa: PT011 (whatever the system calls it)
        socket.create_connection(("127.0.0.1", server.port), timeout=2)


@pytest.mark.parametrize(
    ("script", "seconds", "told"),
    [
        ("print('no such card'); exit(3)", 60.0, "no such card\n"),
        ("import time; time.sleep(60)", 0.5, ""),
    ],
)
def test_one_that_does_not_start_says_what_it_said(script: str, seconds: float, told: str):
    command = [sys.executable, "-c", script]
    with (
        pytest.raises(InputError, match="did not start:\n") as failure,
        started(command, start_seconds=seconds),
    ):
        pytest.fail("it started")
    assert str(failure.value).partition(":\n")[2] == told


def test_what_a_process_started_is_of_its_family():
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 240
        while len(family([process.pid])) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(family([process.pid])) == 2
        assert family([process.pid]) < family([os.getpid()])
    finally:
        process.communicate(b"\n")
    assert family([process.pid]) == set()


@pytest.mark.parametrize("content", [b"", b"18 (a", b"18 (a) S"])
def test_what_is_half_read_is_no_process(tmp_path, monkeypatch, content):
    stats = {12: b"12 (a) S 1 0", 13: b"13 (a) 3 \xff) S 12 0", 18: content}
    for pid, stat in stats.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_bytes(stat)
    gone = tmp_path / "19" / "stat"
    monkeypatch.setattr(glob, "iglob", lambda _: [*map(str, tmp_path.glob("*/stat")), str(gone)])
    assert family([12]) == {12, 13}
