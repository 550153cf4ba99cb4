from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.detokenizer import UNFINISHED, Detokenizer

TEXT = st.text(st.sampled_from("abcé世🙂 "), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abc世"), min_size=1, max_size=4), max_size=3)


class Pieces:
    """A tokenizer whose tokens are the pieces of a text's bytes, cut anywhere."""

    def __init__(self, content: bytes, cuts: list[int]) -> None:
        self.cuts = sorted({cut for cut in cuts if cut < len(content)})
        pairs = pairwise([0, *self.cuts, len(content)])
        self.pieces = [content[start:stop] for start, stop in pairs if start < stop]

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


@st.composite
def pieces(draw: st.DrawFn, text: st.SearchStrategy[str] = TEXT) -> tuple[str, Pieces]:
    content = draw(text)
    cuts = draw(st.lists(st.integers(1, 99), max_size=len(content.encode())))
    return content, Pieces(content.encode(), cuts)


def run(tokenizer: Pieces, stops: list[str]) -> tuple[list[str], str, bool]:
    """What was shown token by token, the final text, and whether a stop string ended it."""
    detokenizer = Detokenizer(tokenizer.decode, stops)
    shown = []
    for token in range(len(tokenizer.pieces)):
        stopped = detokenizer.extend([token]) is not None
        last = token == len(tokenizer.pieces) - 1
        if last and not stopped:
            detokenizer.flush()
        shown.append(detokenizer.delta(finished=stopped or last))
        if stopped:
            return shown, detokenizer.text, True
    return shown, detokenizer.text, False


def expected(text: str, tokenizer: Pieces, stops: list[str]) -> tuple[str, bool]:
    """Cut before the earliest stop string that is whole when the first of them is."""
    read = b""
    for piece in tokenizer.pieces:
        read += piece
        known = read.decode(errors="ignore")
        places = [known.find(stop) for stop in stops if stop in known]
        complete = not read.decode(errors="replace").endswith(UNFINISHED)
        if places and complete:
            return known[: min(places)], True
    return text, False


@given(pieces())
def test_text_comes_whole_and_in_whole_characters(case: tuple[str, Pieces]):
    text, tokenizer = case
    shown, final, stopped = run(tokenizer, [])
    assert "".join(shown) == final == text
    assert not stopped
    assert not any(UNFINISHED in part for part in shown)


def test_bytes_that_become_no_character_wait_for_three_more_and_no_longer():
    """And cost the same however many came before."""
    sizes: list[int] = []

    def decode(tokens: list[int]) -> str:
        sizes.append(len(tokens))
        return bytes(tokens).decode(errors="replace")

    detokenizer = Detokenizer(decode, [])
    for count in range(1, 200):
        detokenizer.extend([0xFF])
        assert len(detokenizer.text) == max(count - 3, 0)
    assert max(sizes) < 20
    detokenizer.extend(list("é".encode()))
    assert detokenizer.text == 199 * UNFINISHED + "é"


@given(pieces(), STOPS)
def test_nothing_of_a_stop_string_is_ever_shown(case: tuple[str, Pieces], stops: list[str]):
    text, tokenizer = case
    shown, final, stopped = run(tokenizer, stops)
    assert (final, stopped) == expected(text, tokenizer, stops)
    assert "".join(shown) == final
    assert not any(stop in final for stop in stops)


@given(pieces(), st.integers(1, 3), STOPS)
def test_an_end_in_the_middle_of_a_character(case: tuple[str, Pieces], lost: int, stops: list[str]):
    """At the last token allowed the rest is shown, up to a stop string in it."""
    text, tokenizer = case
    cut = Pieces(text.encode()[:-lost], tokenizer.cuts)
    shown, final, _ = run(cut, stops)
    assert "".join(shown) == final
    assert not any(stop in final for stop in stops)


def test_text_is_shown_as_soon_as_it_can_be():
    detokenizer = Detokenizer(Pieces("añb END".encode(), [1, 2, 3, 4]).decode, ["END", "STOP"])
    shown = []
    for token in range(4):
        assert detokenizer.extend([token]) is None
        shown.append(detokenizer.delta(finished=False))
    assert shown == ["", "", "", ""]  # three characters might begin "STOP"
    assert detokenizer.extend([4]) == 1
    assert detokenizer.delta(finished=True) == "añb "


@pytest.mark.parametrize(("stops", "text"), [(["b"], "a"), (["abc", "b"], "a"), (["zz"], "abcd")])
def test_the_first_stop_string_to_be_whole_counts(stops: list[str], text: str):
    _, final, _ = run(Pieces(b"abcd", [1, 2, 3]), stops)
    assert final == text


@pytest.mark.parametrize(
    ("text", "stops", "min_tokens", "expected"),
    [
        ("abcabc", ["b"], 0, "a"),
        ("abcabc", ["b"], 2, "abca"),
        ("abcabc", ["bc"], 2, "a"),
        ("abcabc", ["ab", "cabc"], 2, "abc"),
        ("abcabc", ["b", "bca"], 2, "a"),
        ("abcabc", ["b"], 6, "abcabc"),
    ],
)
def test_a_stop_string_counts_when_it_ends_past_the_minimum(
    text: str, stops: list[str], min_tokens: int, expected: str
):
    detokenizer = Detokenizer(lambda tokens: "".join(text[t] for t in tokens), stops, min_tokens)
    for token in range(len(text)):
        if detokenizer.extend([token]) is not None:
            break
    assert detokenizer.text == expected


@given(pieces(), STOPS)
def test_a_stop_string_that_is_shown_ends_the_text_and_holds_nothing_back(
    cut: tuple[str, Pieces], stops: list[str]
):
    _, tokenizer = cut
    hidden, shown = Detokenizer(tokenizer.decode, stops), ""
    showing = Detokenizer(tokenizer.decode, stops, include_stop=True)
    for token in range(len(tokenizer.pieces)):
        ended = showing.extend([token])
        assert hidden.extend([token]) == ended
        shown += showing.delta(finished=False)
        assert shown == showing.text
        if ended is not None:
            assert showing.text.startswith(hidden.text)
            assert showing.text[len(hidden.text) :] in stops
            return


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
    detokenizer = Detokenizer(stripped, (), prompt=tokens)
    for step in steps:
        detokenizer.extend(step)
        tokens = tokens + step
    detokenizer.flush()
    assert stripped([1, *prompt]) + detokenizer.text == stripped(tokens)


def test_a_prompt_that_ends_within_a_character_is_no_context():
    pieces = ["世".encode()[:2], "世".encode()[2:], b"a"]

    def decode(tokens: list[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    detokenizer = Detokenizer(decode, (), prompt=[2, 0])
    detokenizer.extend([1])
    detokenizer.extend([2])
    assert detokenizer.text == decode([1, 2])
