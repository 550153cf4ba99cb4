"""What README.md and docs/ print works as printed, their links lead somewhere, README is short."""

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
from typing import Any

import pytest
import typer

ROOT = Path(__file__).parent.parent
PORT = "8000"
"""The port of the server in the pages; replaced by a free one here."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/log.md")),
    ROOT / "benchmarks" / "results" / "README.md",
    *(ROOT / name / "README.md" for name in ("recipes/demo", "recipes/smollm2", "src/peagle/pair")),
]
"""Pages whose links are followed."""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINES, WORDS, FIGURES = 150, 800, 120
"""Most lines of README.md, most words of its prose, and most figures, its tables' included."""
FIGURE = re.compile(r"(?<![\w.,-])\d[\d.,]*")
"""A number, and not the digits of a name: H100, Qwen3-8B."""


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


def by_day_and_night() -> list[Any]:
    """The commands; long measurements that only pages behind README show are for the night."""
    night = [page != "README.md" and "--limit 2" in command for page, command in commands()]
    marks = [[pytest.mark.nightly] if late else [] for late in night]
    return [pytest.param(*each, marks=mark) for each, mark in zip(commands(), marks, strict=True)]


@pytest.mark.parametrize(("page", "command"), by_day_and_night())
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
    if page != "README.md":  # whose commands are processes in every way
        request.getfixturevalue("forked")
    done = run("-m", "peagle", *arguments, cwd=tmp_path)
    assert done.returncode == 0, f"{page}: {done.stderr}"
    assert done.stdout.strip()


@pytest.mark.parametrize(("page", "source"), blocks("python"))
def test_python_block(
    page: str, source: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if f":{PORT}" in source:
        source = source.replace(f":{PORT}", f":{request.getfixturevalue('port')}")
    if page != "README.md":
        request.getfixturevalue("forked")
    done = run("-c", source, cwd=tmp_path)
    assert done.returncode == 0, f"{page}: {done.stderr}"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    # two threads that wait for each other on busy cores take minutes
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_recipe_keys_in_the_pages_exist() -> None:
    from peagle.train.recipe import Recipe

    given = blocks("yaml")
    assert {"train.md", "first-drafter.md"} <= {page for page, _ in given}
    lines = [line for _, text in given for line in text.splitlines()]
    assert {line.split(":")[0] for line in lines} <= Recipe.model_fields.keys()


def printed_commands(program: str = r"\S*peagle [a-z]") -> list[tuple[str, list[str]]]:
    """(page, words) of commands in blocks that are not run: they need models or machines."""
    found = []
    for page, text in blocks("text"):
        lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
        for number, line in enumerate(lines):
            if re.match(program, line):
                found.append((page, first_command(lines[number:])))
    return found


def first_command(lines: list[str]) -> list[str]:
    """The words of the command that begins some lines; quotes may go over several."""
    for count in range(1, len(lines) + 1):
        with contextlib.suppress(ValueError):
            return shlex.split("\n".join(lines[:count]), comments=True)
    raise AssertionError(f"a quote is not closed: {lines[0]}")


def test_speculative_configs_in_the_pages_are_valid() -> None:
    from peagle.speculative_config import SpeculativeConfig

    given = [
        (page, words[words.index("--speculative-config") + 1])
        for page, words in printed_commands()
        if "--speculative-config" in words and page != "proposers.md"  # names what is not installed
    ]
    assert {"README.md", "serve.md", "generate.md", "local.md"} <= {page for page, _ in given}
    for page, config in given:
        asked = SpeculativeConfig.from_json(config)
        assert asked.has_network or asked.lookup, page


def test_printed_commands_exist_and_take_their_flags() -> None:
    from peagle.cli.app import app

    known: Any = typer.main.get_command(app)
    assert len(printed_commands()) > 10
    for page, (_, name, *words) in printed_commands():
        assert name in known.commands, page
        with pytest.raises(typer.Exit), known.commands[name].make_context(name, [*words, "--help"]):
            """Help is shown once all flags are known."""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("page", "words"), printed_commands(r"python (benchmarks|recipes)/"))
def test_printed_scripts_exist_and_take_their_flags(page: str, words: list[str]) -> None:
    done = run(*words[1:], "--help", cwd=ROOT)
    assert done.returncode == 0, f"{page}: {done.stderr}"


def test_readme_is_read_in_two_minutes() -> None:
    lines = prose(ROOT / "README.md").splitlines()
    said = [re.sub(r"\]\([^)]*\)|<!--.*?-->", "", line) for line in lines]
    words = [word for line in said if not line.startswith("|") for word in line.split()]
    assert len((ROOT / "README.md").read_text().splitlines()) <= LINES
    assert len([word for word in words if re.search(r"\w", word)]) <= WORDS
    assert sum(len(FIGURE.findall(line)) for line in said) <= FIGURES


def prose(page: Path) -> str:
    """A page without its fenced blocks and code."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The names that links to a page's headings may have, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    text = prose(page)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(
        r"^\[.+\]: (\S+)$", text, re.MULTILINE
    )
    for target in targets:
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}"
    labels = re.findall(r"\]\[([^\]]+)\]", text)
    assert set(labels) <= set(re.findall(r"^\[(.+)\]: ", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_every_page_is_linked_from_readme_or_a_page_beside_it(page: Path) -> None:
    others = [other for other in PAGES if other != page]
    linked = {
        (other.parent / target.partition("#")[0]).resolve()
        for other in others
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(other))
    }
    assert page.resolve() in linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_begins_with_what_it_is_for(page: Path) -> None:
    title, blank, opening = page.read_text().split("\n", 2)
    assert title.startswith("# ")
    assert blank == ""
    assert re.match(r"(?!```)[A-Za-z`]", opening), "a sentence, before any command or table"
