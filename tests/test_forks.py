"""A fork of the zygote is what a process of its own would be, as far as a program can see."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import can_fork

PROGRAM = """
import json, os, signal, subprocess, sys
found = {
    "name": __name__, "file": globals().get("__file__"), "arguments": sys.argv, "path": sys.path,
    "place": os.getcwd(), "environment": dict(os.environ), "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "read": sys.stdin.read(),
    "signals": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)],
    "files": [os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in range(3)],
    "given": os.read(int(sys.argv[-1]), 9).decode(),
}
if sys.argv[1] == "starts another":
    asked = subprocess.run([sys.executable, "-c", "print(1 + 1)"], capture_output=True, text=True)
    found["asked"] = asked.stdout, asked.stderr, asked.returncode
if sys.argv[1] == "counts threads":
    import torch
    found["threads"] = torch.get_num_threads()
print(json.dumps(found))
print("told", file=sys.stderr)
sys.exit(7)
"""

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes are never forks here")


def run(how: list[str], place: Path, **options: Any) -> dict[str, Any]:
    given, giving = os.pipe()
    os.write(giving, b"a pipe's")
    os.close(giving)
    done = subprocess.run(
        [sys.executable, *how, str(given)],
        cwd=place,
        input="some text",
        env={**os.environ, "A": "é", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        pass_fds=[given],
        **options,
    )
    os.close(given)
    assert (done.returncode, done.stderr) == (7, "told\n"), done.stderr
    found = json.loads(done.stdout)
    assert found["arguments"].pop() == str(given)
    return found


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}], ids=["", "own session"])
@pytest.mark.parametrize(
    "how",
    [
        ["-c", PROGRAM, "x"],
        ["-P", "-m", "json.tool", "--help"],
        ["-m", "program", "counts threads"],
        ["program.py", "x"],
        ["program.py", "starts another"],
    ],
    ids=["source", "safe", "module", "script", "nested"],
)
def test_it_sees_the_same(how: list[str], options: dict[str, Any], tmp_path: Path, request):
    (tmp_path / "program.py").write_text(PROGRAM)
    ask = asked_help if "-P" in how else run
    own = ask(how, tmp_path, **options)
    request.getfixturevalue("forked")
    assert ask(how, tmp_path, **options) == own


def asked_help(how: list[str], place: Path, **options: Any) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *how], cwd=place, capture_output=True, text=True, **options
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals_end_it(number: signal.Signals):
    handled = "import signal as s, time; s.signal(s.SIGINT, s.default_int_handler)"
    program = f"{handled}; print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert Path(f"/proc/{process.pid}/cmdline").read_text().find("zygote.py") > 0
        process.send_signal(number)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == -number
    assert (b"KeyboardInterrupt" in errors) == (number == signal.SIGINT)
