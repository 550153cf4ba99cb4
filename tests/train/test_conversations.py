import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import InputError
from peagle.train.conversations import PADDING, Document, pack, read_documents


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def write(path: Path, *lines: object) -> str:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts), encoding="utf-8")
    return str(path)


def test_every_form_of_a_line(tmp_path: Path):
    file = write(
        tmp_path / "data.jsonl",
        {"prompt_token_ids": [1, 2], "token_ids": [3, 4, 5], "text": "ignored"},
        "",
        {"prompt": "ab", "response": "cd"},
        {"text": "xyz"},
    )
    assert read_documents([file], encode, 10) == [
        Document((1, 2, 3, 4, 5), 2),
        Document((97, 98, 99, 100), 2),
        Document((120, 121, 122), 0),
    ]


def test_long_documents_are_cut_and_hopeless_ones_left_out(tmp_path: Path):
    file = write(
        tmp_path / "data.jsonl",
        {"prompt_token_ids": [1], "token_ids": [2] * 20},
        {"prompt_token_ids": [1] * 9, "token_ids": [2] * 20},
        {"prompt_token_ids": [1], "token_ids": [2]},
    )
    assert read_documents([file, file], encode, 10) == [Document((1, *[2] * 9), 1)] * 2


LINES = [
    ("{", "not JSON"),
    ("[1]", "not a JSON object"),
    ({"question": "?"}, r"needs prompt_token_ids \+ token_ids, prompt \+ response, or text"),
    ({"text": 5}, "text is not a string"),
    ({"prompt": "a", "response": None}, "response is not a string"),
    ({"prompt_token_ids": "ab", "token_ids": [1]}, "prompt_token_ids is not a list of token ids"),
    ({"prompt_token_ids": [1], "token_ids": [1.5]}, "token_ids is not a list of token ids"),
    ({"prompt_token_ids": [1], "token_ids": [-1]}, "token_ids is not a list of token ids"),
    ('{"text": "\\ud800 half a character"}', "text is not valid UTF-8"),
]


@pytest.mark.parametrize(("line", "message"), LINES)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str):
    file = write(tmp_path / "data.jsonl", {"text": "a fine one"}, line)
    with pytest.raises(InputError, match=rf"data\.jsonl:2: {message}"):
        read_documents([file], encode, 10)


def test_files_that_hold_nothing(tmp_path: Path):
    with pytest.raises(InputError, match=r"missing cannot be read: .*No such file"):
        read_documents([str(tmp_path / "missing")], encode, 10)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(InputError, match="bytes cannot be read"):
        read_documents([str(tmp_path / "bytes")], encode, 10)
    with pytest.raises(InputError, match="no document with a response that fits in a row"):
        read_documents([write(tmp_path / "empty", "")], encode, 10)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=8))
def test_packing_keeps_documents_whole_and_in_order(sizes: list[tuple[int, int]]):
    tokens = iter(range(1, 1000))
    documents = [
        Document(tuple(next(tokens) for _ in range(prompt + response)), prompt)
        for prompt, response in sizes
    ]
    rows = pack(documents, 12)
    found = []
    for row in range(len(rows)):
        numbers = rows.documents[row]
        for number in range(int(numbers.max()) + 1):
            where = (numbers == number).nonzero().flatten()
            assert where.tolist() == list(range(int(where[0]), int(where[-1]) + 1))
            assert rows.positions[row, where].tolist() == list(range(len(where)))
            prompt = int((~rows.charged[row, where]).sum())
            assert rows.charged[row, where].tolist() == [i >= prompt for i in range(len(where))]
            found.append(Document(tuple(rows.tokens[row, where].tolist()), prompt))
        assert not rows.charged[row, numbers == PADDING].any()
    assert found == documents
