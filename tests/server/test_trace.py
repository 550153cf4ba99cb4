from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from peagle.server.trace import TextOffsets, token_bytes, token_name, token_text


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer of one token: how it is stored, and its text."""

    piece: str
    text: str

    def decode(self, tokens: list[int]) -> str:
        return self.text

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.piece


@pytest.mark.parametrize(
    ("piece", "text", "wanted"),
    [
        ("Ġok", " ok", b" ok"),
        ("æĹ", "\ufffd", "日".encode()[:2]),
        ("<0xE6>", "\ufffd", b"\xe6"),
        ("\ufffd", "\ufffd", "\ufffd".encode()),
    ],
)
def test_the_bytes_of_a_token(piece: str, text: str, wanted: bytes):
    assert token_bytes(Vocabulary(piece, text), 0, text) == wanted


def test_a_part_of_a_character_stands_where_the_character_does():
    offsets = TextOffsets()
    parts = [b"a", "日".encode()[:1], "日".encode()[1:] + b" ", b"b"]
    assert [offsets.add(part) for part in parts] == [0, 1, 1, 3]


WORDS = [
    "<unk>",
    "\u2581",
    "\u2581Hello",
    "\u2581\u2581",
    "world",
    "!",
    "<0xE4>",
    "<0xC3>",
    "<0xA9>",
]


def stripping() -> Any:
    """A tokenizer as SentencePiece's: its decoder drops the space at the start of a text."""
    raw = Tokenizer(models.BPE({word: n for n, word in enumerate(WORDS)}, [], unk_token="<unk>"))
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    raw.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


@pytest.mark.parametrize("pieces", [[2, 4, 5], [2, 2, 1, 4], [3, 2], [2, 7, 8, 2], [4, 2]])
def test_a_token_has_the_space_that_its_text_begins_with(pieces: list[int]):
    tokenizer = stripping()
    texts = [token_text(tokenizer, token) for token in pieces]
    data = b"".join(map(partial(token_bytes, tokenizer), pieces, texts))
    whole = tokenizer.decode(pieces)
    assert data.decode() == (f" {whole}" if WORDS[pieces[0]].startswith("\u2581") else whole)


def test_tokens_are_named_by_text_or_id():
    tokenizer = stripping()
    assert [token_name(tokenizer, token, None) for token in (1, 2, 6)] == [" ", " Hello", "\ufffd"]
    assert token_name(tokenizer, 2, True) == "token_id:2"
