"""Steps that do not end: told with their stacks, then ended."""

import subprocess
import sys
import threading

import pytest
import tiny

from peagle import SamplingParams
from peagle.engine.engine import Engine
from peagle.engine_client.watchdog import Watchdog

PATIENCE = 120.0
KEPT = """
import ctypes
from types import SimpleNamespace
from unittest import mock
from peagle.engine_client.watchdog import Watchdog

core = SimpleNamespace(began=None, facts=SimpleNamespace(step_timeout=1.0))
with mock.patch("peagle.engine_client.watchdog.SPARE", 0.0):
    Watchdog(core, print, print, kills=True).start()
    input()
    ctypes.PyDLL(None).sleep(3600)
"""
"""A call in C keeps the interpreter, once the watchdog has looked."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.engine_client.watchdog.TICK", 0.01)


@pytest.fixture
def engine(targets, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """One whose second step waits for an event, `go_on`."""
    engine = Engine(targets["easy"].decoder, None, 0, tiny.engine_config(step_timeout=3.0))
    usual, steps = engine.worker.exchange, []
    engine.go_on = threading.Event()

    def exchange(step):
        steps.append(step)
        assert len(steps) != 2 or engine.go_on.wait(PATIENCE)
        return usual(step)

    monkeypatch.setattr(engine.worker, "exchange", exchange)
    engine.add("one", [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    return engine


def test_a_step_that_does_not_end_is_told_with_its_stacks_then_given_up(
    engine: Engine, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    watchdog = Watchdog(engine, engine.go_on.set)
    engine.step()  # a first step is slow where the machine is busy
    watchdog.start()
    while engine.busy:
        engine.step()
    assert engine.go_on.is_set(), "it was given up"
    early, late = (record.getMessage() for record in caplog.records)
    assert early.startswith("a step takes long: step 2 (1 cycles of up to 0 drafts, ")
    assert late.startswith("a step took longer than --step-timeout 3; the engine ends: step 2 (")
    assert capfd.readouterr().err.count("in exchange") == 2


def test_steps_that_end_are_left_alone(engine: Engine, caplog: pytest.LogCaptureFixture):
    """Though the time between two of them is long."""
    looks = threading.Semaphore(0)
    watchdog = Watchdog(engine, lambda: pytest.fail("it was given up"), looks.release)
    engine.go_on.set()
    watchdog.start()
    engine.step()
    for _ in range(150):
        assert looks.acquire(timeout=PATIENCE)
    while engine.busy:
        engine.step()
    watchdog.stop()
    assert not caplog.records


@pytest.mark.usefixtures("forked")
def test_an_interpreter_that_is_kept_ends_the_process_and_says_where():
    kept = subprocess.Popen(
        [sys.executable, "-c", KEPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert kept.stdout.readline(), "it has looked once"
    _, errors = kept.communicate("\n", timeout=PATIENCE)
    assert kept.returncode == 1
    assert "Timeout (0:00:01)!" in errors
    assert 'File "<string>", line 11 in <module>' in errors
