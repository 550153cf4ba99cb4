"""Servers that are started: their ports, their ends, and what those say that do not start."""

import sys
import time
from pathlib import Path

import pytest

from peagle.bench.processes import family
from peagle.bench.server_process import listening, started
from peagle.errors import InputError

LISTENS = """
import socket, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("begins", flush=True)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


def test_a_server_is_ready_and_nothing_of_it_is_left(tmp_path: Path):
    log = tmp_path / "log"
    with started([sys.executable, "-c", LISTENS], log, ready=listening) as server:
        listening(server.port)
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert server.address.port == server.port
        assert server.start_seconds > 0.0
        members = family([server.pid])
        assert len(members) == 2
    assert log.read_text() == "begins\n"
    end = time.monotonic() + 120
    while family(members) and time.monotonic() < end:  # its child is another's to wait for
        time.sleep(0.05)
    assert not family(members)
    with pytest.raises(OSError):  # noqa: PT011 (whatever the system calls it)
        listening(server.port)


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
