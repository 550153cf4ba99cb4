"""Who listens on this machine, and whether others had its cores."""

import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peagle.bench.processes import CoreTime, core_time, family, listeners

BEFORE = CoreTime(ran=10.0, waited=1.0, others=100.0)
pytestmark = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux")


@pytest.mark.parametrize(
    ("after", "share"),
    [
        (CoreTime(18.0, 3.0, 150.0), 0.8),  # others ran, and it waited for two of ten seconds
        (CoreTime(18.0, 3.0, 100.5), 0.95),  # it waited for itself, but for half a second
        (CoreTime(18.0, 3.0, 99.9), 1.0),  # clocks differ
        (CoreTime(20.0, 1.0, 150.0), 1.0),  # others ran on cores that it did not need
        (CoreTime(10.0, 1.0, 150.0), None),
        (CoreTime(4.0, 0.5, 150.0), None),  # a process of it ended
    ],
)
def test_others_took_no_more_than_they_ran_and_it_waited(after: CoreTime, share: float | None):
    found = after.share_since(BEFORE)
    assert found == (None if share is None else pytest.approx(share))


@pytest.mark.parametrize(
    ("host", "kind"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_a_listener_of_this_machine_is_found(host: str, kind: socket.AddressFamily):
    try:
        listening = socket.create_server((host, 0), family=kind)
    except OSError:
        pytest.skip(f"no {host}")
    with listening:
        port = listening.getsockname()[1]
        assert listeners(host, port) == {os.getpid()}
        assert listeners("192.0.2.1", port) == set()  # of another machine
        assert listeners("no such host", port) == set()
    assert listeners(host, port) == set()


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
    assert core_time([process.pid]) is None


@pytest.fixture
def others(tmp_path, monkeypatch):
    """A machine of processes 10 to 19, each started by the one before."""
    for pid in range(10, 20):
        task = tmp_path / str(pid) / "task" / str(pid)
        task.mkdir(parents=True)
        (task.parent.parent / "fd").mkdir()
        (task.parent.parent / "stat").write_text(f"{pid} (a) S {pid - 1} 0")
        (task / "schedstat").write_text("2000000000 500000000 3")
    (tmp_path / "stat").write_text("cpu 0\n")
    monkeypatch.setattr("peagle.bench.processes.PROC", tmp_path)
    return tmp_path


def test_all_of_a_family_count_whatever_their_names_are(others):
    (others / "14" / "stat").write_bytes(b"14 (a) 3 \xff) S 13 0")
    assert family([12]) == {*range(12, 20)}
    found = core_time([12])
    assert found is not None
    assert (found.ran, found.waited) == (pytest.approx(16.0), pytest.approx(4.0))


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError, PermissionError])
def test_a_process_that_ends_while_others_are_listed_disturbs_nothing(others, monkeypatch, error):
    def gone(call):
        """The call, which finds no process 19 and nothing of it any more."""

        def without(path, *arguments, **options):
            if "/19" in str(path):
                raise error(path)
            return call(path, *arguments, **options)

        return without

    for name in ("scandir", "listdir", "readlink"):
        monkeypatch.setattr(os, name, gone(getattr(os, name)))
    monkeypatch.setattr(io, "open", gone(io.open))
    assert family([12]) == {*range(12, 19)}
    times = core_time([12])
    assert times is not None
    assert times.ran == pytest.approx(14.0)
    assert listeners("127.0.0.1", 1) == set()


def test_what_is_half_read_is_no_process(others):
    (others / "19" / "stat").write_text("")
    (others / "18" / "stat").write_text("18 (a")
    (others / "17" / "task" / "17" / "schedstat").write_text("")
    assert family([12]) == {*range(12, 18)}
    times = core_time([12])
    assert times is not None
    assert times.ran == pytest.approx(10.0)


def test_one_that_shares_its_only_core_with_another_waits_for_it():
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        time.sleep(1.0)
        before = core_time([both[0].pid])
        time.sleep(1.0)
        after = core_time([both[0].pid])
        assert before is not None
        assert after is not None
        share = after.share_since(before)
        assert share is not None
        assert share < 0.75
        together = core_time([one.pid for one in both])
        assert together is not None
        assert together.ran > after.ran
    finally:
        for one in both:
            one.kill()
            one.wait()
