"""Work with bounds of time and memory, in a process that can be ended."""

import contextvars
import os
import threading
import time
from pathlib import Path

import pytest

from peagle.errors import InputError
from peagle.sandbox import LEFT, Sandbox

PATIENCE = 120.0


def work(text: str) -> object:
    """What a test asks for."""
    match text.split():
        case ["say", word]:
            return [word, os.getpid()]
        case ["refuse", word]:
            raise InputError(word)
        case ["spin"]:
            while True:
                pass
        case ["take"]:
            return len(b" " * (4 << 30))
        case ["wait", path]:
            Path(path).touch()
            time.sleep(PATIENCE)
    return None


def test_it_returns_and_refuses_what_the_function_does() -> None:
    """In one other process, which is kept."""
    sandbox = Sandbox()
    word, pid = sandbox.call(work, "say é")
    assert (word, pid != os.getpid()) == ("é", True)
    with pytest.raises(InputError, match=r"^no$"):
        sandbox.call(work, "refuse no")
    for _ in range(100):  # and takes no more and more of its memory
        assert sandbox.call(work, "say é") == ["é", pid]


@pytest.mark.parametrize("endless", ["spin", "take"])
def test_what_takes_too_much_ends_and_the_next_has_another_process(
    endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.sandbox.CPU_SECONDS", 1)
    sandbox = Sandbox()
    _, pid = sandbox.call(work, "say a")
    monkeypatch.setattr("peagle.sandbox.WALL_SECONDS", 5.0)
    with pytest.raises(InputError, match="too complex"):
        sandbox.call(work, endless)
    monkeypatch.undo()
    _, other = sandbox.call(work, "say a")
    assert other != pid


def test_what_nobody_waits_for_ends(tmp_path: Path) -> None:
    """While it runs and while it waits for its turn."""
    sandbox, left, told = Sandbox(), threading.Event(), []

    def ask() -> None:
        with pytest.raises(InputError, match="nobody waits") as refused:
            sandbox.call(work, f"wait {tmp_path / 'begun'}")
        told.append(refused)

    threads = []
    for _ in range(2):
        context = contextvars.copy_context()
        context.run(LEFT.set, left)
        threads.append(threading.Thread(target=context.run, args=(ask,)))
        threads[-1].start()
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    left.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(told) == 2
    assert sandbox.call(work, "say a")[0] == "a"
