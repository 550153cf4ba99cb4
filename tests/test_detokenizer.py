import copy
from itertools import chain, pairwise

import pytest
from families import encode, tokenizer
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from peagle.detokenizer import (
    UNFINISHED,
    ByteDetokenizer,
    WindowDetokenizer,
    detokenize,
    detokenizers,
)

TEXT = st.text(st.sampled_from("abcé世🙂 "), max_size=30)


@given(TEXT, st.lists(st.integers(1, 99)))
def test_text_comes_whole_and_in_whole_characters(text: str, cuts: list[int]):
    content = text.encode()
    places = sorted({cut for cut in cuts if cut < len(content)})
    pieces = [content[a:b] for a, b in pairwise([0, *places, len(content)]) if a < b]

    def decode(tokens: list[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    detokenizer = WindowDetokenizer(decode)
    shown = [detokenizer.feed([token]) for token in range(len(pieces))]
    assert "".join(shown) + detokenizer.flush() == text
    assert not any(UNFINISHED in part for part in shown)


def test_bytes_that_become_no_character_wait_for_three_more_and_no_longer():
    """And cost the same however many came before."""
    sizes: list[int] = []

    def decode(tokens: list[int]) -> str:
        sizes.append(len(tokens))
        return bytes(tokens).decode(errors="replace")

    detokenizer, text = WindowDetokenizer(decode), ""
    for count in range(1, 200):
        text += detokenizer.feed([0xFF])
        assert len(text) == max(count - 3, 0)
    assert max(sizes) < 20
    assert text + detokenizer.feed(list("é".encode())) == 199 * UNFINISHED + "é"


WORDS = ["", " a", " b", "c", "\n"]
"""The first is a special token, which is not shown."""


def stripped(tokens: list[int]) -> str:
    """Decodes like Llama 2's tokenizer: without the space of the first word."""
    return "".join(WORDS[token] for token in tokens).removeprefix(" ")


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), max_size=8),
)
def test_text_goes_on_where_its_prompt_ends(prompt: list[int], steps: list[list[int]]):
    """However many tokens a step brings."""
    tokens = [1, *prompt]  # a prompt without text leaves no context
    detokenizer, text = WindowDetokenizer(stripped, tokens), ""
    for step in steps:
        text += detokenizer.feed(step)
        tokens = tokens + step
    assert stripped([1, *prompt]) + text + detokenizer.flush() == stripped(tokens)


def test_a_prompt_that_ends_within_a_character_is_no_context():
    pieces = ["世".encode()[:2], "世".encode()[2:], b"a"]

    def decode(tokens: list[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    detokenizer = WindowDetokenizer(decode, [2, 0])
    assert detokenizer.feed([1]) + detokenizer.feed([2]) == decode([1, 2])


def test_a_skipped_token_parts_two_texts():
    words = ["a", "<mark>", " b"]
    detokenizer = WindowDetokenizer(lambda tokens: "".join(words[token] for token in tokens))
    assert detokenizer.feed([0]) == "a"
    detokenizer.skip(1)
    assert detokenizer.feed([2]) == " b"


SPELLED = ["\ufffd", "日本"]
"""What the tokenizers below have no piece for but bytes."""


def fallback(strip: bool = False) -> PreTrainedTokenizerFast:
    """As Llama 2's and Gemma's: words with a mark for a space, and bytes for all else."""
    words = ["<unk>", "<s>", "▁", "▁a", "a", "▁b", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: n for n, word in enumerate(words)}
    merges = [("▁", "a"), ("▁", "b")]
    raw = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    raw.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    raw.add_special_tokens(["<s>"])
    raw.add_tokens([AddedToken("▁▁", normalized=False)])  # as Gemma's runs of spaces
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def metaspace() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE({"▁a": 0, "▁b": 1, "c": 2, "\ufffd": 3, "▁": 4}, []))
    raw.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


@given(st.data())
def test_bytes_of_tokens_make_the_text_that_the_tokenizer_makes_of_them(data: st.DataObject):
    """In any cuts, special tokens shown or not, half characters and broken bytes among them."""
    own, skip = tokenizer("qwen3"), data.draw(st.booleans())
    added = st.sampled_from(sorted(own.get_added_vocab().values()))
    token = st.one_of(added, st.integers(0, len(own) - 1))
    written = TEXT.map(lambda text: encode("qwen3", text))
    parts = data.draw(st.lists(st.one_of(token.map(lambda one: [one]), written)))
    ids = [*chain.from_iterable(parts)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)))))
    detokenizer = detokenizers(own, skip)([])
    assert isinstance(detokenizer, ByteDetokenizer)
    shown = [detokenizer.feed(ids[a:b]) for a, b in pairwise([0, *cuts, len(ids)])]
    assert "".join(shown) + detokenizer.flush() == own.decode(ids, skip_special_tokens=skip)


WORDS_ADDED = ["čaj", "đêm", "café", "Öl", "naïve", "茶", " été", "\ufffd"]
"""Letters that stand for bytes elsewhere in a byte-level vocabulary."""


def with_words() -> PreTrainedTokenizerFast:
    own = copy.deepcopy(tokenizer("qwen3"))
    own.add_tokens(WORDS_ADDED)
    return own


OWN = {"byte-level": with_words(), "fallback": fallback(), "stripped": fallback(strip=True)}


@pytest.mark.parametrize("name", OWN)
@given(st.data())
def test_a_text_comes_back_whatever_its_letters_and_cuts(name: str, data: st.DataObject):
    """Added words, words of the vocabulary, and the sign of a broken character in bytes, too."""
    own = OWN[name]
    words = st.sampled_from([*WORDS_ADDED, *SPELLED, " a", "b", "🙂", "é", "世"])
    text = "".join(data.draw(st.lists(words, max_size=12)))
    prompt = own.encode("a b", add_special_tokens=False)
    ids = own.encode(f"a b{text}", add_special_tokens=False)[len(prompt) :]
    assume(own.encode(f"a b{text}", add_special_tokens=False)[: len(prompt)] == prompt)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)))))
    detokenizer = detokenizers(own, True)(prompt)
    shown = [detokenizer.feed(ids[a:b]) for a, b in pairwise([0, *cuts, len(ids)])]
    assert "".join(shown) + detokenizer.flush() == text


def test_an_added_letter_is_itself_or_the_byte_that_the_vocabulary_has_under_it():
    own = copy.deepcopy(tokenizer("qwen3"))
    own.add_tokens(["½", "é", "ĠI"])
    ids = [own.convert_tokens_to_ids(piece) for piece in ("½", "é", "Ä")]
    half, acute, first = ids
    for tokens, text in (
        ([half], "½"),
        ([acute, half], "é½"),
        ([first, half, half], "Ľ½"),
        ([first, first, half], "\ufffdĽ"),
        (own.encode("龍½", add_special_tokens=False), "龍½"),
    ):
        assert detokenize(own, tokens) == text
        detokenizer = detokenizers(own, True)([])
        shown = [detokenizer.feed([token]) for token in tokens]
        assert "".join(shown) + detokenizer.flush() == text


@pytest.mark.parametrize("name", [*OWN, "metaspace"])
@given(st.data())
def test_any_tokens_make_one_text_however_many_come_at_once(name: str, data: st.DataObject):
    """Half characters and bytes that are none among them."""
    own = OWN.get(name) or metaspace()
    token = st.integers(0, len(own) - 1)
    prompt, ids = data.draw(st.lists(token, max_size=3)), data.draw(st.lists(token, max_size=20))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)))))
    texts = []
    for places in (range(len(ids) + 1), [0, len(ids)], [0, *cuts, len(ids)]):
        detokenizer = detokenizers(own, False)(prompt)
        shown = [detokenizer.feed(ids[a:b]) for a, b in pairwise(places)]
        texts.append("".join(shown) + detokenizer.flush())
    assert texts[0] == texts[1] == texts[2]


def test_a_text_lacks_its_first_space_where_the_tokenizer_drops_it():
    own = fallback(strip=True)
    ids = own.encode(" a b", add_special_tokens=False)
    assert detokenize(own, ids) == own.decode(ids) == "a b"
    assert detokenize(own, [own.convert_tokens_to_ids("<s>"), *ids], skip_special=True) == "a b"
    assert detokenizers(own, True)(ids).feed(ids) == " a b"


def test_a_tokenizer_that_drops_spaces_is_asked_itself():
    """Of every other kind is the one whose decoder is not of bytes."""
    own = Tokenizer(models.BPE({"▁a": 0, "▁b": 1, "c": 2}, []))
    own.decoder = decoders.Metaspace()
    detokenizer = detokenizers(PreTrainedTokenizerFast(tokenizer_object=own), False)([2])
    assert [detokenizer.feed([0]), detokenizer.feed([1, 2]), detokenizer.flush()] == [
        " a",
        " bc",
        "",
    ]
