"""The tokenised corpus: flat uint16 files, `<|endoftext|>` after each document, plain and .xz."""

import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from corpus import read
from tokenizers import Tokenizer

END = 0  # <|endoftext|>
BATCH = 512  # documents tokenised at once
# Tokens are two bytes wide; the window spans the whole file and finds repeats anywhere in it.
XZ = [
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 2**28, "lc": 0, "lp": 1, "pb": 1},
]


def batches(corpus: Path) -> Iterator[list[str]]:
    """The corpus's texts, BATCH at a time."""
    texts: list[str] = []
    for record in read(corpus):
        texts.append(record["text"])
        if len(texts) == BATCH:
            yield texts
            texts = []
    if texts:
        yield texts


def tokenise(corpus: Path, tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """All documents' ids, END after each document, and the number of bytes of text."""
    pieces: list[np.ndarray] = []
    size = 0
    for texts in batches(corpus):
        size += sum(len(text.encode()) for text in texts)
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            pieces.append(np.array([*encoding.ids, END], dtype=np.uint16))
    return np.concatenate(pieces), size


def main(
    corpus: Annotated[Path, typer.Option(help="Folder of train.jsonl.gz and val.jsonl.gz.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder for train.bin, val.bin.")],
    packed: Annotated[Path, typer.Option(help="Folder for train.bin.xz, val.bin.xz.")],
) -> None:
    """Tokenise both splits, plain and compressed."""
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    encoder.encode_special_tokens = True  # a source that spells a special token is only text
    for folder in (out, packed):
        folder.mkdir(parents=True, exist_ok=True)
    for split in ("val", "train"):
        ids, size = tokenise(corpus / f"{split}.jsonl.gz", encoder)
        ids.astype("<u2").tofile(out / f"{split}.bin")
        archive = packed / f"{split}.bin.xz"
        archive.write_bytes(lzma.compress(ids.astype("<u2").tobytes(), filters=XZ))
        ratio = size / len(ids)
        print(f"{split}: {len(ids) / 1e6:.2f}M tokens, {ratio:.3f} bytes/token", end=", ")
        print(f"{archive.stat().st_size / 1e6:.1f} MB packed", flush=True)


if __name__ == "__main__":
    typer.run(main)
