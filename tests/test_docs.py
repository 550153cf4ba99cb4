"""Every command and Python block that README.md and docs/ print works as printed."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PORT = "8000"
"""The port of the server in the pages; replaced by a free one here."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, content) of every fenced block of a language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page.name, found) for page in PAGES for found in pattern.findall(page.read_text())]


def commands() -> list[tuple[str, str]]:
    lines = [(page, line) for page, block in blocks("bash") for line in block.splitlines()]
    return [(page, line.split("  #")[0].strip()) for page, line in lines if line.strip()]


@pytest.fixture(scope="session")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The port of `peagle serve`, as the pages start it."""
    assert ("serve.md", "peagle serve") in commands()
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = str(free.getsockname()[1])
    command = [sys.executable, "-m", "peagle", "serve", "--port", number]
    process = subprocess.Popen(command, cwd=tmp_path_factory.mktemp("serve"))
    try:
        wait_for(int(number))
        yield number
    finally:
        process.terminate()
        process.wait()


def wait_for(port: int) -> None:
    """Wait until something answers on a port."""
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as line:
            line.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            if b" 200 " in line.recv(64):
                return
        time.sleep(0.1)
    raise AssertionError("the server did not start")


@pytest.mark.parametrize(("page", "command"), commands())
def test_command(page: str, command: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program, *arguments = shlex.split(command)
    if program == "pip":
        assert ".[serve,structured]" in arguments  # part of what `make` installs
        return
    if program == ".":
        assert arguments == [".venv/bin/activate"]
        assert "VENV   := .venv\n" in (ROOT / "Makefile").read_text()
        return
    if program == "curl" or arguments[:1] == ["serve"]:
        port = request.getfixturevalue("port")
        if program == "curl":
            call = [program, "-f", *(word.replace(f":{PORT}", f":{port}") for word in arguments)]
            subprocess.run(call, check=True)
        return
    if program == "make":
        dry = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert dry.returncode == 0, f"{page}: {dry.stderr}"
        return
    assert program == "peagle", f"{page}: {command}"
    done = run("-m", "peagle", *arguments, cwd=tmp_path)
    assert done.returncode == 0, f"{page}: {done.stderr}"
    assert done.stdout.strip()


@pytest.mark.parametrize(("page", "source"), blocks("python"))
def test_python_block(
    page: str, source: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if f":{PORT}" in source:
        source = source.replace(f":{PORT}", f":{request.getfixturevalue('port')}")
    done = run("-c", source, cwd=tmp_path)
    assert done.returncode == 0, f"{page}: {done.stderr}"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    # two threads that wait for each other on busy cores take minutes
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_recipe_keys_in_the_training_page_exist() -> None:
    from peagle.train.recipe import Recipe

    lines = [
        line for name, text in blocks("yaml") if name == "train.md" for line in text.splitlines()
    ]
    assert lines
    assert {line.split(":")[0] for line in lines} <= Recipe.model_fields.keys()
