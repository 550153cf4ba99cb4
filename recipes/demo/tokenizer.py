"""A byte-level BPE tokenizer of 4,096 entries for Python source, as a `transformers` directory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from corpus import read
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4_096  # entries, special tokens and the 256 bytes included
END = "<|endoftext|>"  # id 0: end, beginning and padding; it separates documents
MASK = "<|mask|>"  # id 1: what P-EAGLE's mask slots embed; never occurs in text
SPECIAL = [END, MASK, *(f"<|reserved_{i}|>" for i in range(6))]
LONGEST_TOKEN = 20  # bytes; longer ones would be lines of dashes
CONTEXT = 2_048  # tokens
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"

# What merges may not cross. A newline never joins its neighbours: a prompt cut at any line end is
# then tokenised as the corpus was. An indentation is one piece, and the word after it has no space.
PIECE = "|".join(
    [
        r" {2,}",  # an indentation, or a run that aligns
        r" ?[\p{L}_]+",  # a name or a word, underscores included
        r" ?\p{N}",  # one digit
        r" ?[^\s\p{L}_\p{N}]+",  # operators and brackets
        r"\n+",
        r"\s",  # a tab, a lone space, anything rarer
    ]
)


def sample(corpus: Path, characters: int) -> Iterator[str]:
    """Texts from the start of the corpus, a random part of it since its order is by hash."""
    for record in read(corpus):
        if characters <= 0:
            return
        characters -= len(record["text"])
        yield record["text"]


def train(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE over PIECEs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as `AutoTokenizer` loads it: exact both ways, its template only joins."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        mask_token=MASK,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write tokenizer.json, and a tokenizer_config.json that also holds the template."""
    tokenizer.save_pretrained(out, save_jinja_files=False)
    # transformers 5 writes a class name that version 4, which some engines use, does not know.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main(
    corpus: Annotated[Path, typer.Option(help="train.jsonl.gz of the corpus.")],
    out: Annotated[Path, typer.Option(help="Folder for the tokenizer.")],
    sample_mb: Annotated[int, typer.Option(help="Text to learn the merges from, millions.")] = 40,
) -> None:
    """Train the tokenizer on the corpus's first texts."""
    tokenizer = train(sample(corpus, sample_mb * 1_000_000))
    save(wrap(tokenizer), out)
    print(f"{tokenizer.get_vocab_size()} entries in {out}")


if __name__ == "__main__":
    typer.run(main)
