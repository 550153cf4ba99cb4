"""Prompts that ask to edit given code or to quote given text, for lookups: JSONL of chats.

python benchmarks/edits.py HumanEval.jsonl.gz --out edits.jsonl
"""

import gzip
import json
from pathlib import Path
from typing import Annotated, Any

import typer

RENAME = (
    "Here is a Python function:\n\n```python\n{code}```\n\nRename it to `{name}_of`, change "
    "nothing else, and write the whole function again."
)
QUOTE = (
    "Here are some notes:\n\n{text}\n\nFirst quote them word by word, then say in one sentence "
    "what they are about."
)


def main(
    human_eval: Annotated[Path, typer.Argument(help="HumanEval's file, with its solutions.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    count: Annotated[int, typer.Option(help="Prompts, half of either kind.")] = 50,
) -> None:
    """Write the prompts."""
    with gzip.open(human_eval, "rt", encoding="utf-8") as file:
        tasks = [json.loads(line) for line in file]
    half = count // 2
    edits = [_edit(task) for task in tasks[:half]]
    quotes = [_quote(task) for task in tasks[half:count]]
    lines = (json.dumps({"prompt": text}) for text in (*edits, *quotes))
    out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _edit(task: dict[str, Any]) -> str:
    code = task["prompt"] + task["canonical_solution"]
    return RENAME.format(code=code, name=task["entry_point"])


def _quote(task: dict[str, Any]) -> str:
    """What a docstring says, as prose."""
    _, said, *_ = task["prompt"].replace("'''", '"""').split('"""')
    return QUOTE.format(text=" ".join(said.split()))


if __name__ == "__main__":
    typer.run(main)
