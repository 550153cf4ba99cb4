from typing import Any

import pytest
from families import tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from peagle.server.trace import TextOffsets, TokenTexts


def test_the_bytes_of_a_token_of_any_other_tokenizer_are_its_texts():
    raw = Tokenizer(models.WordLevel({"▁ok": 0, "日": 1}, unk_token="日"))
    raw.decoder = decoders.Metaspace()
    own = PreTrainedTokenizerFast(tokenizer_object=raw)
    assert [TokenTexts(own).data(token) for token in (0, 1)] == [b" ok", "日".encode()]


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
    data = b"".join(map(TokenTexts(tokenizer).data, pieces))
    whole = tokenizer.decode(pieces)
    assert data.decode() == (f" {whole}" if WORDS[pieces[0]].startswith("\u2581") else whole)


def test_tokens_are_named_by_text_or_id():
    tokenizer = stripping()
    assert [*map(TokenTexts(tokenizer).name, (1, 2, 6))] == [" ", " Hello", "\ufffd"]
    assert TokenTexts(tokenizer, as_ids=True).name(2) == "token_id:2"


def test_part_of_a_character_is_told_by_its_bytes():
    assert TokenTexts(stripping()).data(6) == b"\xe4"
    own = tokenizer("qwen3")
    first, *rest = own.encode("日", add_special_tokens=False)
    assert TokenTexts(own).text(first) == "\ufffd"
    assert b"".join(map(TokenTexts(own).data, (first, *rest))) == "日".encode()
