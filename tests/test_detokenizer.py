from itertools import chain, pairwise

from families import encode, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from peagle.detokenizer import UNFINISHED, ByteDetokenizer, WindowDetokenizer, detokenizers

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
