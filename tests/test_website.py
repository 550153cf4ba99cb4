"""The site has every page, its links lead somewhere, and its reference names all there is."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import peagle
from peagle.cli.app import app
from peagle.train.recipe import Recipe

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
ROOT = Path(__file__).parent.parent
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
NAVIGATION = [
    path
    for part in SITE["nav"]
    for pages in part.values()
    for page in pages
    for path in page.values()
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site") / "pages"
    subprocess.run([sys.executable, ROOT / "docs" / "website.py", place], check=True)
    return place


def test_the_navigation_has_every_page_once(pages: Path) -> None:
    docs = {str(path.relative_to(pages)) for path in (pages / "docs").rglob("*.md")}
    assert len(set(NAVIGATION)) == len(NAVIGATION)
    assert docs <= set(NAVIGATION)
    assert all((pages / path).is_file() for path in NAVIGATION)


def test_sections(pages: Path) -> None:
    assert [name for part in SITE["nav"] for name in part] == [
        *("Start", "Choose", "Serve", "Measure yours", "Train", "Results", "How it works"),
        *("Reference", "Project"),
    ]


def test_links_lead_somewhere(pages: Path) -> None:
    """Also those that lead out of docs/."""
    lost = []
    for page in pages.rglob("*.md"):
        for target in LINK.findall(page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                lost.append(f"{page.relative_to(pages)}: {target}")
    assert not lost


def test_the_api_is_complete(pages: Path) -> None:
    told = (pages / "docs/reference/api.md").read_text()
    for name in peagle.__all__:
        kind = getattr(peagle, name)
        assert f"## {name}\n" in told
        for field in getattr(kind, "model_fields", ()):
            assert f"| `{field}` |" in told
        own = [] if hasattr(kind, "model_fields") else vars(kind)
        for member in own:
            if callable(getattr(kind, member)) and not member.startswith("_"):
                assert f"### {name}.{member}\n" in told


def test_recipes_and_commands_are_complete(pages: Path) -> None:
    keys = (pages / "docs/reference/recipe.md").read_text()
    assert all(f"| `{name}` |" in keys for name in Recipe.model_fields)
    told = (pages / "docs/reference/commands.md").read_text()
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert f"## peagle {name}\n" in told
        flags = [flag for each in command.params if not each.hidden for flag in each.opts]
        assert all(flag in told for flag in flags)


def test_metrics_are_the_servers(pages: Path) -> None:
    told = (pages / "docs/reference/metrics.md").read_text()
    assert "| `vllm:spec_decode_num_accepted_tokens_total` | counter |" in told


def test_language_models_get_a_list_of_pages(pages: Path) -> None:
    told = (pages / "llms.txt").read_text()
    assert told.startswith(f"# {SITE['site_name']}\n\n> ")
    assert all(f"]({path}): " in told for path in NAVIGATION)
