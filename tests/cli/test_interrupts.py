"""Ctrl-C while something slow is imported; a module that signals itself stands in for it."""

import os
import signal
import subprocess
import sys

import pytest

INTERRUPTED = (130, "", "peagle: interrupted\n")
SLOW = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep({pause})
except BaseException:  # as libraries do that try an import
    raise ImportError("cannot load module more than once per process")
print("went on", flush=True)
os._exit(0)
"""


@pytest.fixture
def run(tmp_path):
    """Runs peagle with a module of that name in place of the true one."""

    def with_slow(module, *arguments, pause=600, ignore=False):
        (tmp_path / f"{module}.py").write_text(SLOW.format(pause=pause))
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        handler = signal.SIG_IGN if ignore else signal.default_int_handler
        done = subprocess.run(
            [sys.executable, "-m", "peagle", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
            timeout=500,
        )
        return done.returncode, done.stdout, done.stderr

    return with_slow


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["--help"]),
        ("pydantic", ["demo"]),
        ("torch", ["demo"]),
        ("torch", ["generate", "--prompt", "x"]),
        ("uvicorn", ["serve", "--port", "0"]),
        ("transformers", ["generate", "--prompt", "x"]),
        ("transformers", ["serve", "--port", "0"]),
    ],
)
def test_ctrl_c_during_an_import_ends_at_once_with_a_word(run, module, arguments):
    assert run(module, *arguments) == INTERRUPTED


def test_ctrl_c_during_an_import_leaves_no_half_result(run, tmp_path):
    out = tmp_path / "results" / "out.json"
    out.parent.mkdir()
    assert run("transformers", "bench", "--json", str(out)) == INTERRUPTED
    assert list(out.parent.iterdir()) == []


def test_a_background_job_goes_on_to_ignore_ctrl_c(run):
    assert run("typer", "--help", pause=0, ignore=True) == (0, "went on\n", "")
