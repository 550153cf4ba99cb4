"""Prompts for the target to continue, cut from the corpus: seeds of the drafters' training text.

Half are functions in HumanEval's form, a signature and its docstring, some after the file's
imports. Half are passages that start at a top-level statement and stop at a line's end.
"""

import ast
import gzip
import json
import lzma
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from corpus import read
from tokenizers import Tokenizer

DOCSTRING = (20, 1_200)  # characters, without its quotes
PROMPT = 2_000  # most characters of a function prompt
IMPORTS_SHARE = 0.4  # share of function prompts that follow imports
IMPORTS = 6  # most lines
PASSAGE = (50, 300)  # tokens
PASSAGES_PER_FILE = 6  # tried
WINDOW = 2_400  # characters, enough for PASSAGE[1] tokens

Function = ast.FunctionDef | ast.AsyncFunctionDef


def imports(lines: list[str], tree: ast.Module, most: int) -> str:
    """The file's first import lines and the blank lines before what follows."""
    nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    short = [node for node in nodes if node.lineno == node.end_lineno][:most]
    return "".join(lines[node.lineno - 1] + "\n" for node in short) + "\n\n" if short else ""


def opening(lines: list[str], function: Function) -> str | None:
    """The lines from `def` to the end of the docstring, or None if they make no good prompt."""
    body = function.body
    text = ast.get_docstring(function)
    if text is None or not DOCSTRING[0] <= len(text) <= DOCSTRING[1] or len(body) < 2:
        return None
    end = body[0].end_lineno or 0
    return textwrap.dedent("\n".join(lines[function.lineno - 1 : end])) + "\n"


def function_prompts(text: str, random: Random) -> Iterator[tuple[bool, str]]:
    """Each documented function of a file, and whether it is a method, with its class line."""
    tree, lines = ast.parse(text), text.split("\n")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for owner in (tree, *classes):
        for node in owner.body:
            head = opening(lines, node) if isinstance(node, Function) else None
            if head is None:
                continue
            method = isinstance(owner, ast.ClassDef)
            if method:
                head = f"class {owner.name}:\n" + textwrap.indent(head, "    ")
            if random.random() < IMPORTS_SHARE:
                head = imports(lines, tree, random.randint(1, IMPORTS)) + head
            if len(head) <= PROMPT:
                yield method, head


def windows(text: str, random: Random) -> Iterator[str]:
    """Stretches of a file that begin at a top-level statement, at most WINDOW characters long."""
    lines = text.splitlines(keepends=True)
    starts = [node.lineno - 1 for node in ast.parse(text).body]
    for start in random.sample(starts, min(PASSAGES_PER_FILE, len(starts))):
        yield "".join(lines[start : start + PASSAGE[1]])[:WINDOW]


def passages(texts: list[str], tokenizer: Tokenizer, random: Random) -> Iterator[str]:
    """Windows cut at the last line's end before a random number of tokens."""
    for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        goal = random.randint(*PASSAGE)
        if len(encoding.ids) <= goal:
            continue
        cut = text.rfind("\n", 0, encoding.offsets[goal][0]) + 1
        if len(tokenizer.encode(text[:cut]).ids) >= PASSAGE[0]:
            yield text[:cut]


def shuffled(prompts: Iterable[str], random: Random) -> list[str]:
    """Each prompt once, in random order."""
    unique = sorted(set(prompts))
    random.shuffle(unique)
    return unique


def write(path: Path, prompts: Iterable[str]) -> None:
    """JSON lines, compressed where the name ends in .gz or .xz."""
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)


def main(
    corpus: Annotated[Path, typer.Option(help="Folder of train.jsonl.gz and val.jsonl.gz.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")],
    out: Annotated[list[Path], typer.Option(help="The .jsonl to write; .gz, .xz compress it.")],
    functions: Annotated[int, typer.Option(help="Most function prompts.")] = 70_000,
    files: Annotated[int, typer.Option(help="Most passages.")] = 70_000,
    seed: Annotated[int, typer.Option(help="Seed of every choice.")] = 0,
) -> None:
    """Cut the prompts and mix both kinds."""
    warnings.simplefilter("ignore", SyntaxWarning)  # from parsing the sources
    random = Random(seed)
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    kinds: dict[bool, list[str]] = {False: [], True: []}
    stretches: list[str] = []
    for split in ("val", "train"):
        for record in read(corpus / f"{split}.jsonl.gz"):
            for method, prompt in function_prompts(record["text"], random):
                kinds[method].append(prompt)
            stretches.extend(windows(record["text"], random))
    plain, methods = (shuffled(kinds[method], random) for method in (False, True))
    heads = [*plain, *methods][:functions]
    cuts = list(islice(passages(shuffled(stretches, random), encoder, random), files))
    chosen = shuffled([*heads, *cuts], random)
    for path in out:
        write(path, chosen)
    print(f"{len(plain)} functions and {len(methods)} methods, {len(heads)} taken; ", end="")
    print(f"{len(cuts)} passages; {len(chosen)} prompts")


if __name__ == "__main__":
    typer.run(main)
