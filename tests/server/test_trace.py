from dataclasses import dataclass

import pytest

from peagle.server.trace import TextOffsets, token_bytes


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
