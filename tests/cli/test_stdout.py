import os
import subprocess
import sys

import pytest

FULL = "peagle: stdout cannot be written: No space left on device\n"
FEW = ["--max-tokens", "4"]


def run(*arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.run([sys.executable, "-m", "peagle", *map(str, arguments)], **options)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("how", [["--prompt", "x"], ["--prompt", "x", "--json"]])
def test_a_disk_full_of_text_is_one_line(pair, how):
    with open("/dev/full", "w") as full:
        done = run("generate", "--target", pair.target, *how, *FEW, stdout=full)
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.usefixtures("forked")
def test_so_is_one_that_does_not_take_a_result(pair):
    """Which is written at the end."""
    how = ["--limit", 1, "--rounds", 1, "--methods", "none", "--json", "-", *FEW]
    with open("/dev/full", "w") as full:
        done = run("bench", "--target", pair.target, *how, stdout=full)
    assert done.returncode == 2
    assert done.stderr.endswith(FULL)


@pytest.mark.parametrize("what", ["--version", "--help"])
def test_so_is_one_that_does_not_take_the_help(what):
    with open("/dev/full", "w") as full:
        done = run(what, stdout=full)
    assert (done.returncode, done.stderr) == (2, FULL)


def test_a_reader_that_leaves_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = run("--help", stdout=writer)
    os.close(writer)
    assert done.stderr == ""


def test_a_closed_stdout_is_no_error():
    done = run("--version", stdout=None, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_encoding_does_not_have_is_escaped():
    program = "from peagle.cli import stdout; stdout.install(); print('\\xe9 \\u65e5', flush=True)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        stdout=subprocess.PIPE,
    )
    assert done.stdout == b"\xe9 \\u65e5\n"
