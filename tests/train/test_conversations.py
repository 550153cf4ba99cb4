import json
import time
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, THINKING, assistant, byte_tokenizer, user
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from peagle.errors import InputError
from peagle.train.conversations import Encoder, Overlong, Summary, fit, read_documents
from peagle.train.packing import Document
from peagle.train.prepare import prepare
from peagle.train.samples import Continuation

VOCAB = 300


def write(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def read(
    *sources: str, length: int = 40, overlong: Overlong = "cut", template: str | None = CHATML
) -> tuple[list[Document], Summary]:
    return read_documents(sources, lambda: byte_tokenizer(template), length, overlong, VOCAB)


def test_every_form_becomes_a_document_in_the_order_of_the_data(tmp_path: Path):
    file = write(
        tmp_path / "data.jsonl",
        {"prompt_token_ids": [1, 2], "token_ids": [3, 4, 5]},
        {"prompt": "ab", "response": "cd"},
        {"text": "xyz"},
        {"messages": [user("a"), assistant("b")]},
        {"text": "second"},
    )
    documents, summary = read(file)
    tokenizer = byte_tokenizer(CHATML)
    assert documents[0] == Document.answered((1, 2, 3, 4, 5), 2)
    texts = ["<|bos|>abcd", "<|bos|>xyz", tokenizer.decode(documents[3].tokens), "<|bos|>second"]
    assert [tokenizer.decode(document.tokens) for document in documents[1:]] == texts
    assert texts[2].startswith("<|im_start|>user\na<|im_end|>")
    said = [tokenizer.decode(d.tokens[a:b]) for d in documents[1:] for a, b in d.responses]
    assert said == ["cd", "<|bos|>xyz", "b<|im_end|>", "<|bos|>second"]
    lengths = [len(document.tokens) for document in documents]
    assert summary == Summary(5, sum(lengths), 3 + 2 + 4 + 2 + 7, cut=0, split=0, dropped=0)
    assert str(summary).endswith("18 of them in responses; 0 samples cut, 0 split, 0 dropped")


def test_the_tokenizer_is_loaded_only_for_text(tmp_path: Path):
    file = write(tmp_path / "data.jsonl", {"prompt_token_ids": [1], "token_ids": [2, 3]})
    unused = pytest.fail
    documents, _ = read_documents([file], lambda: unused("loaded"), 10, "cut", VOCAB)
    assert documents == [Document.answered((1, 2, 3), 1)]


LONG = [
    {"prompt_token_ids": [1], "token_ids": [2] * 20},
    {"prompt_token_ids": [1] * 9, "token_ids": [3] * 20},
    {"prompt_token_ids": [1], "token_ids": [4]},
    {"prompt_token_ids": [1] * 12, "token_ids": [5]},
    {"prompt_token_ids": [1], "token_ids": [6] * 9},
]
FATES: list[tuple[Overlong, list[int], tuple[int, int, int]]] = [
    ("cut", [10, 10], (1, 0, 3)),
    ("split", [10, 10, 10, 9, 10], (0, 2, 2)),
    ("drop", [10], (0, 0, 4)),
]


@pytest.mark.parametrize(("overlong", "lengths", "counts"), FATES)
def test_long_samples_are_cut_split_or_dropped_and_counted(
    tmp_path: Path, overlong: Overlong, lengths: list[int], counts: tuple[int, int, int]
):
    documents, found = read(write(tmp_path / "data.jsonl", *LONG), length=10, overlong=overlong)
    assert [len(document.tokens) for document in documents] == lengths
    assert (found.cut, found.split, found.dropped) == counts
    assert all(any(b - a > 1 for a, b in document.responses) for document in documents)


SPANS = st.lists(st.integers(0, 40), max_size=6).map(sorted)


@given(st.integers(1, 40), SPANS, st.integers(1, 12), st.sampled_from(["cut", "split", "drop"]))
def test_pieces_are_the_documents_own_tokens(
    size: int, edges: list[int], length: int, overlong: Overlong
):
    """Tokens are their own positions, so that every piece says where it comes from."""
    spans = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False) if a < b <= size]
    pieces = fit(Document(tuple(range(size)), tuple(spans)), length, overlong)
    windows = [range(start, min(start + length, size)) for start in range(0, size, length)]
    if size > length and overlong != "split":
        windows = windows[:1] if overlong == "cut" else []
    within = [[(max(a, w.start), min(b, w.stop)) for a, b in spans] for w in windows]
    kept = [
        window
        for window, parts in zip(windows, within, strict=True)
        if any(b - a > 1 and b - window.start > 2 for a, b in parts)
    ]
    assert [piece.tokens for piece in pieces] == [tuple(window) for window in kept]
    responses = {position for first, last in spans for position in range(first, last)}
    for piece in pieces:
        learned = {p for first, last in piece.responses for p in piece.tokens[first:last]}
        assert learned == responses & set(piece.tokens)


def test_a_response_whose_ids_are_known_is_learned_as_it_was_written(tmp_path: Path):
    tokenizer = byte_tokenizer(CHATML)
    apart = tokenizer("h", add_special_tokens=False).input_ids
    apart += tokenizer("i", add_special_tokens=False).input_ids
    row = {"prompt": "ab", "response": "hi"}
    assert apart != tokenizer("hi", add_special_tokens=False).input_ids
    documents, _ = read(write(tmp_path / "data.jsonl", row | {"token_ids": apart}, row))
    responses = [[*one.tokens[a:b]] for one in documents for a, b in one.responses]
    assert responses == [apart]  # one token, as which the other is encoded, teaches nothing
    assert documents[0].tokens[:3] == tuple(tokenizer("ab").input_ids)


def test_a_response_is_encoded_as_what_goes_on() -> None:
    """Tokenizers of SentencePiece's kind put a space before every text."""
    tokenizer = byte_tokenizer(None)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("_")
    [[document]] = Encoder(lambda: tokenizer).encode([Continuation("a:1", "f(", "x)")])
    assert tokenizer.decode(document.tokens, skip_special_tokens=True) == "_f(x)"
    assert tokenizer.decode(document.tokens[document.responses[0][0] :]).startswith("x)")


def test_a_sample_of_several_documents_is_counted_once(tmp_path: Path):
    """The first answer's thoughts are left out later, so that each has a prompt of its own."""
    tokenizer = byte_tokenizer(THINKING)
    thought = "<think>\nhm\n</think>\n\n"

    def own(text: str) -> dict[str, Any]:
        ids = tokenizer(f"{thought}{text}<|im_end|>", add_special_tokens=False).input_ids
        return assistant(f"{thought}{text}", token_ids=ids)

    file = write(
        tmp_path / "d.jsonl", {"messages": [user("a"), own("b"), user("c"), own("d" * 40)]}
    )
    documents, summary = read(file, length=100, template=THINKING)
    assert [len(document.tokens) for document in documents] == [41, 100]
    assert {document.source for document in documents} == {f"{file}:1"}
    assert (summary.documents, summary.cut, summary.dropped) == (2, 1, 0)


def test_ids_survive_datasets(tmp_path: Path):
    """In Parquet every message has all keys of all messages, most of them null."""
    tokenizer = byte_tokenizer(CHATML)
    ids = [*tokenizer("h", add_special_tokens=False).input_ids, 4]
    rows = [
        {"source": "a", "messages": [user("a"), assistant("h", token_ids=ids)]},
        {"source": "b", "prompt": "p", "response": "h", "token_ids": ids},
    ]
    file = write(tmp_path / "data.jsonl", *rows)
    parquet = tmp_path / "data.parquet"
    Dataset.from_json(file).to_parquet(parquet)
    expected, _ = read(file)
    assert [one.tokens[-len(ids) :] for one in expected] == [tuple(ids)] * 2
    for source in (f"hf:{file}", f"hf:{parquet}"):
        assert read(source)[0] == expected


BAD = [
    ({"prompt": "no answer"}, "the prompt has no response; peagle regenerate"),
    ({"messages": [user("a")]}, "the conversation has no assistant turn; peagle regenerate"),
    ({"messages": [user(5)]}, "turn 1: content is neither"),  # type: ignore[arg-type]
    ({"text": 5}, "text is not a string"),
    ({"prompt_token_ids": [1], "token_ids": [300]}, "token id 300 is outside the target's vocab"),
    (
        {"messages": [user("a"), assistant("", token_ids=[300])]},
        "token id 300 is outside the target's vocab",
    ),
    (
        {"messages": [user("a"), assistant("hi", token_ids=[2**40])]},
        "turn 2: token_ids say something else by the tokenizer of tiny; use the target that wrote",
    ),
    (
        {"prompt_token_ids": [1], "token_ids": [20], "text": "b"},
        "token_ids say something else by the tokenizer of tiny; use the target that wrote",
    ),
    ({"prompt": "a", "response": "b", "token_ids": [20]}, "token_ids say something else by the"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named(tmp_path: Path, line: dict[str, Any], message: str):
    file = write(tmp_path / "data.jsonl", {"text": "a fine one"}, line)
    with pytest.raises(InputError, match=rf"data\.jsonl:2: {message}"):
        read(file)


def test_a_tokenizer_of_another_target(tmp_path: Path):
    file = write(tmp_path / "data.jsonl", {"text": "plain"})
    with pytest.raises(InputError, match=r"data\.jsonl:1: token id .* vocabulary of 50; use data"):
        read_documents([file], lambda: byte_tokenizer(None), 10, "cut", 50)


def test_chats_need_a_template(tmp_path: Path):
    file = write(tmp_path / "data.jsonl", {"messages": [user("a"), assistant("b")]})
    with pytest.raises(InputError, match=r"data\.jsonl:1: tiny has no chat template; use a model"):
        read(file, template=None)


def test_documents_say_where_they_were_read(tmp_path: Path):
    """Also for every piece of a long one: a sample that breaks a run is named by its source."""
    file = write(tmp_path / "data.jsonl", {"text": "short"}, {"text": "long" * 5})
    documents, _ = read(file, length=8, overlong="split")
    assert [document.source for document in documents] == [f"{file}:1"] + [f"{file}:2"] * 3


def test_data_that_leaves_nothing(tmp_path: Path):
    empty, short = write(tmp_path / "empty"), write(tmp_path / "short", {"text": "long"})
    with pytest.raises(InputError, match="empty: there are no samples"):
        read(empty)
    with pytest.raises(InputError, match=r"none of 1 samples has two tokens of a response"):
        read(short, length=3, overlong="drop")


def test_answers_that_are_left_out_beside_others_are_counted(tmp_path: Path):
    ids = [{"token_ids": [3] * n, **assistant("")} for n in (3, 40)]
    turns = [user("a"), ids[0], user("b"), ids[1]]
    file = write(tmp_path / "data.jsonl", {"messages": turns})
    documents, found = read(file, length=30, overlong="drop")
    assert len(documents) == 1
    assert found.dropped == 1


def test_many_conversations_and_long_ones_take_seconds(tmp_path: Path):
    turns = [turn for _ in range(3) for turn in (user("why? " * 20), assistant("because " * 20))]
    many = write(tmp_path / "many.jsonl", *[{"messages": turns}] * 1_000)
    long = write(tmp_path / "long.jsonl", {"messages": turns * 100})
    start = time.process_time()
    documents, _ = read(many, long, length=1 << 20)
    assert [len(document.responses) for document in documents] == [3] * 1_000 + [300]
    assert time.process_time() - start < 20


def test_a_recipe_says_what_becomes_of_long_samples(recipe_for: Any, tmp_path: Path):
    told: list[Summary] = []
    for overlong in ("cut", "split"):
        prepare(recipe_for(tmp_path / "out", row_length=40, overlong=overlong), told.append)
    cut, split = told
    assert (cut.cut, cut.split, cut.response_tokens) == (64, 0, 64 * (40 - 6))
    assert (split.cut, split.split, split.response_tokens) == (0, 64, 64 * 42)
