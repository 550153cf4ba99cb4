"""Keep what was measured as a result, and say what it replaces.

    python benchmarks/keep.py bench.json vllm-bf16 qwen3-8b_2026-12-01 --measured "…" \\
        --command "peagle bench …" --supersedes qwen3-8b_2026-11-23

FILE is what a script beside this one wrote with `--out`, which knows its command and commit, or
`peagle bench --json`, which does not: name them, else the result says that they are unknown.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.script import run
from peagle.errors import InputError
from records.bench import result_of
from records.result import Result
from records.store import RESULTS, problems, read, read_all, write


def main(
    file: Annotated[Path, typer.Argument(help="What was measured.")],
    claim: Annotated[str, typer.Argument(help="The claim that it is evidence for.")],
    name: Annotated[str, typer.Argument(help="Its name among the results, with the date.")],
    measured: Annotated[str, typer.Option(help="What was measured, in a sentence.")] = "",
    command: Annotated[str, typer.Option(help="The command that measured it.")] = "",
    commit: Annotated[str, typer.Option(help="The commit that was measured.")] = "",
    supersedes: Annotated[list[str] | None, typer.Option(help="Results that it replaces.")] = None,
) -> None:
    """Write the result and mark what it replaces; then `make figures` renews the tables."""
    place = RESULTS / f"{name}.json"
    if place.exists():
        raise InputError(f"{place} exists; give another name")
    given = {"claim": claim, "measured": measured, "command": command, "commit": commit}
    told = {key: value for key, value in given.items() if value}
    kept = {name: Result.model_validate({**dict(opened(file, measured)), **told})}
    before = read_all()
    for old in supersedes or ():
        if old not in before:
            raise InputError(f"there is no result {old}")
        kept[old] = before[old].model_copy(update={"superseded_by": name})
    for problem in problems(before | kept):
        raise InputError(problem)
    for each, result in kept.items():
        write(result, RESULTS / f"{each}.json")
        print(RESULTS / f"{each}.json")


def opened(file: Path, measured: str) -> Result:
    """A result's file, or that of `peagle bench --json`. Raises `InputError`."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    if "environment" not in document:
        return read(file)
    if not measured:
        raise InputError("say what was measured: --measured SENTENCE")
    return result_of(document, measured)


if __name__ == "__main__":
    run(main)
