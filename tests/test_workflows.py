"""GitHub's workflows run targets of the Makefile and nothing else, with pinned actions."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = re.findall(r"^([a-z][a-z -]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
PINNED = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def jobs(path: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load(path.read_text())["jobs"].values()


def commands(job: dict[str, Any]) -> Iterator[str]:
    """What a job runs, once for each value of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    for step in job["steps"]:
        if "run" in step:
            used = re.search(r"\$\{\{ matrix\.(\w+) \}\}", step["run"])
            for value in matrix[used[1]] if used else [""]:
                yield step["run"].replace(used[0], value) if used else step["run"]


def test_they_are_all_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "nightly", "release"]
    known = {name for names in TARGETS for name in names.split()}
    asked = {command for path in WORKFLOWS for job in jobs(path) for command in commands(job)}
    assert asked <= {f"make {name}" for name in known}
    wanted = (
        "lint",
        "test",
        "wheel",
        "docs",
        "tagged",
        "nightly",
        "test-vllm",
        "test-lowest",
        "test-newest",
    )
    assert {f"make {name}" for name in wanted} <= asked


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_may_only_read(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert lines
    assert all(PINNED.search(line) for line in lines)
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def test_every_python_that_we_name_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.split(" :: ")[-1] for line in project["classifiers"] if ":: 3." in line]
    [matrix] = [job["strategy"]["matrix"] for job in jobs(WORKFLOWS[0]) if "strategy" in job]
    assert matrix["python"] == named
    assert project["requires-python"] == f">={named[0]}"


def test_publishing_trusts_no_token() -> None:
    publish = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"][
        "publish"
    ]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in "".join(path.read_text() for path in WORKFLOWS)
