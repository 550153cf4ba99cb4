"""Token files of several sizes: the target's answers, shuffled and cut, as token ids.

Each size is the beginning of every larger one, so that drafters differ in how much they learned.
"""

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.script import run
from peagle.errors import InputError
from peagle.files import replacing
from peagle.models.families import read_spec
from peagle.models.tokenizer import load_tokenizer
from peagle.train.conversations import read_documents
from peagle.train.packing import Document

ROW_LENGTH = 2_048
"""That of the recipes; longer conversations are left out."""
NEVER_WRITTEN = frozenset({5, *range(7, 17)})
"""Special tokens of pretraining, which the target has hardly learned: the mask token is one."""


def usable(documents: Iterable[Document]) -> list[Document]:
    """Documents without tokens that a drafter may take as its mask."""
    return [each for each in documents if NEVER_WRITTEN.isdisjoint(each.tokens)]


def beginning(documents: Iterable[Document], tokens: int) -> Iterator[Document]:
    """The first documents, with at least so many tokens of answers.

    Raises `InputError` where there are fewer.
    """
    left = tokens
    for document in documents:
        if left <= 0:
            return
        yield document
        left -= sum(end - start for start, end in document.responses)
    if left > 0:
        raise InputError(f"the answers have {tokens - left:,} tokens, not {tokens:,}; write more")


def line(document: Document) -> str:
    """A document of one answer as `peagle train` reads it."""
    prompt = document.prompt
    ids = {"prompt_token_ids": prompt, "token_ids": document.tokens[len(prompt) :]}
    return json.dumps(ids, separators=(",", ":")) + "\n"


def write(path: Path, documents: Iterable[Document]) -> None:
    """Write a token file, whole or not at all."""
    with replacing(path) as scratch, gzip.open(scratch, "wt", encoding="utf-8") as lines:
        lines.writelines(map(line, documents))


def main(
    answers: Annotated[list[Path], typer.Argument(help="Files of peagle regenerate.")],
    target: Annotated[Path, typer.Option(help="The target that wrote them.")],
    out: Annotated[Path, typer.Option(help="Folder for the token files.")],
    millions: Annotated[
        list[float], typer.Option(help="Millions of tokens of answers in a file; repeatable.")
    ],
    seed: Annotated[int, typer.Option(help="Draws the order.")] = 0,
) -> None:
    """Write a token file of each size."""
    documents, summary = read_documents(
        [str(path) for path in answers],
        partial(load_tokenizer, target),
        ROW_LENGTH,
        "drop",
        read_spec(target).vocab_size,
    )
    print(summary)
    kept = usable(documents)
    random.Random(seed).shuffle(kept)
    out.mkdir(parents=True, exist_ok=True)
    for size in millions:
        path, cut = out / f"{size:g}M.jsonl.gz", list(beginning(kept, round(size * 1e6)))
        write(path, cut)
        print(f"{path}: {len(cut):,} answers, {path.stat().st_size / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    run(main)
