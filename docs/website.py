"""The pages of the documentation's site: this repository's, and those made from the code.

    python docs/website.py build/pages      (`make docs`)

Pages keep their places, README first, and what they link to lies beside them as in the repository:
links that lead out of docs/ lead to a file of the site. `docs/reference` is made from the code.
"""

import ast
import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
import yaml

import peagle
from peagle.cli.app import app
from peagle.engine.engine import EngineFacts, EngineStats
from peagle.server.metrics import Metrics
from peagle.speculation import DraftTotals
from peagle.train.recipe import Recipe

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")
TEXT = re.compile(r"\[([^\]]*)\]\([^)]*\)")
"""A link, and the text that it shows."""
LIMITS = re.compile(r"Annotated\[(.*), \w+\(.*\)\]")
"""A type with its limits, and the type."""
Row = tuple[str, ...]


def main(place: Path) -> None:
    """Write every page of the site below a directory, which is made anew."""
    shutil.rmtree(place, ignore_errors=True)
    for path in sorted(files()):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, place / path)
    (place / "docs" / "reference").mkdir()
    for name, write in REFERENCE.items():
        (place / "docs" / "reference" / name).write_text(write(), encoding="utf-8")
    (place / "llms.txt").write_text(llms(place), encoding="utf-8")


def files() -> set[Path]:
    """README, what is in docs/, and all that these pages link to, on and on."""
    docs = (path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".png"))
    todo = [*map(Path, ("README.md", "CHANGELOG.md")), *(path.relative_to(ROOT) for path in docs)]
    found = set[Path]()
    while todo:
        path = todo.pop()
        if path not in found and (ROOT / path).is_file():
            found.add(path)
            todo += linked(path) if path.suffix == ".md" else []
    return found


def linked(page: Path) -> Iterator[Path]:
    """Where a page's links to files of the repository lead."""
    for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        where = (ROOT / page.parent / target).resolve()
        if where.is_relative_to(ROOT):
            yield where.relative_to(ROOT)


def api() -> str:
    """Each public name with its signature and what it says of itself."""
    parts = [
        "# Python API\n\nWhat `import peagle` gives; everything else may change at any time.\n"
    ]
    for name in peagle.__all__:
        parts.append(f"## {name}\n\n{described(getattr(peagle, name))}")
    return "\n".join(parts)


def described(kind: Any) -> str:
    """A class: its docstring, its fields if it is a configuration, and its public methods."""
    parts = [f"{inspect.getdoc(kind)}\n"]
    if hasattr(kind, "model_fields"):
        return "\n".join([*parts, fields(kind)])
    own = [base for base in kind.__mro__ if base.__module__.startswith("peagle.")]
    for name in dict.fromkeys(name for base in own for name in vars(base)):
        member = getattr(kind, name)
        if callable(member) and (name == "__init__" or not name.startswith("_")):
            text = f"{name}{signature(member)}"
            parts.append(f"### {kind.__name__}.{name}\n\n```text\n{text}\n```\n")
            told = member.__doc__ if name == "__init__" else inspect.getdoc(member)
            parts.append(f"{inspect.cleandoc(told or '')}\n")
        elif isinstance(member, property | cached_property) and not name.startswith("_"):
            parts.append(f"### {kind.__name__}.{name}\n\n{inspect.getdoc(member) or ''}\n")
    return "\n".join(parts)


def signature(method: Callable[..., Any]) -> str:
    """A method's signature on lines that can be read."""
    whole = inspect.signature(method)
    text = ",\n    ".join(str(parameter) for parameter in whole.parameters.values())
    return f"(\n    {text}\n)"


def recipe() -> str:
    """Each key of a recipe."""
    return (
        "# Keys of a recipe\n\nEvery key that `peagle train` reads; [train](../train.md) explains "
        f"how they go together.\n\n{fields(Recipe)}"
    )


def fields(config: Any) -> str:
    """A configuration's fields: name, type, default, and what is written below it."""
    [tree] = ast.parse(inspect.getsource(config)).body
    assert isinstance(tree, ast.ClassDef)
    rows = []
    for line, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) in config.model_fields:
            name = ast.unparse(line.target)
            kind = LIMITS.sub(r"\1", ast.unparse(line.annotation))
            told = str(ast.literal_eval(after.value)) if isinstance(after, ast.Expr) else ""
            rows.append((f"`{name}`", f"`{kind}`", default(config.model_fields[name]), told))
    return table(("name", "type", "default", "meaning"), rows)


def default(field: Any) -> str:
    """What a field is if it is left out."""
    return (
        "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)}`"
    )


def commands() -> str:
    """Each command with its options, as `--help` shows them."""
    group: Any = typer.main.get_command(app)
    parts = ["# Commands\n\nEvery command with its options, as `--help` shows them.\n"]
    for name, command in sorted(group.commands.items()):
        context = command.make_context(name, [], resilient_parsing=True)
        records = [each.get_help_record(context) for each in command.get_params(context)]
        rows = [(f"`{flag}`", text) for flag, text in filter(None, records)]
        parts.append(f"## peagle {name}\n\n{inspect.cleandoc(command.help or '')}\n")
        parts.append(table(("option", "what it does"), rows))
    return "\n".join(parts)


def metrics() -> str:
    """Each metric of `GET /metrics` with its kind."""
    facts = EngineFacts(0, (), 0, 0, 1, 0, False, None, 0, 0, 0, 0, 0.0)
    state = {"stats": EngineStats(0, 0, 0.0, 0, 0, 0), "step_age": 0.0, "responds": True}
    idle: Any = SimpleNamespace(facts=facts, k=1, pid=os.getpid(), **state)
    idle.replicas = [idle]
    text = Metrics("demo", idle, [DraftTotals([0])]).text().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.MULTILINE))
    helps = re.findall(r"^# HELP (\S+) (.*)", text, re.MULTILINE)
    rows = [(f"`{name}`", kinds[name], told) for name, told in helps]
    return (
        f"# Metrics\n\nEvery series of `GET /metrics`.\n\n{table(('name', 'kind', 'what'), rows)}"
    )


def table(head: Row, rows: Sequence[Row]) -> str:
    """A table of Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    cells = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def llms(place: Path) -> str:
    """The site for a language model: each page of the navigation with its first sentences."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    lines = [f"# {site['site_name']}\n\n> {site['site_description']}\n"]
    for section in site["nav"]:
        [(title, pages)] = section.items()
        lines.append(f"\n## {title}\n\n")
        for page in pages:
            [(name, path)] = page.items()
            _, _, text = (place / path).read_text(encoding="utf-8").partition("\n\n")
            about = TEXT.sub(r"\1", " ".join(text.split("\n\n")[0].split()))
            lines.append(f"- [{name}]({path}): {about}\n")
    return "".join(lines)


REFERENCE: dict[str, Callable[[], str]] = {
    "api.md": api,
    "commands.md": commands,
    "metrics.md": metrics,
    "recipe.md": recipe,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
