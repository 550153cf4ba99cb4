"""Plain text through a reader: whole characters, and stop strings."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.detokenizer import UNFINISHED, WindowDetokenizer
from peagle.dialects.events import Content
from peagle.dialects.markers import Markers
from peagle.dialects.parser import PlainText
from peagle.dialects.reader import Reader
from peagle.stop_strings import StopStrings

TEXT = st.text(st.sampled_from("abcé世🙂 "), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abc世"), min_size=1, max_size=4), max_size=3)


def plain_reader(
    decode: Callable[[Sequence[int]], str], stops: Sequence[str], min_tokens: int = 0
) -> Reader:
    stop = StopStrings(stops) if stops else None
    return Reader(PlainText(), Markers(), WindowDetokenizer(decode), stop, min_tokens)


def fresh(reader: Reader) -> str:
    return "".join(event.text for event in reader.fresh() if isinstance(event, Content))


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
    reader = plain_reader(tokenizer.decode, stops)
    shown = []
    for token in range(len(tokenizer.pieces)):
        stopped = reader.extend([token]) is not None
        shown.append(fresh(reader))
        if stopped:
            return shown, reader.message.content, True
    reader.finish(ended=False)
    return [*shown, fresh(reader)], reader.message.content, False


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


@given(pieces(), STOPS)
def test_nothing_of_a_stop_string_is_ever_shown(case: tuple[str, Pieces], stops: list[str]):
    text, tokenizer = case
    shown, final, stopped = run(tokenizer, stops)
    assert (final, stopped) == expected(text, tokenizer, stops)
    assert "".join(shown) == final
    assert not any(stop in final for stop in stops)


def read(reader: Reader, runs: Sequence[Sequence[int]]) -> tuple[int, str, str | None, int]:
    """Tokens read, the content, what ended it, and of how many tokens it is known what they are."""
    count = 0
    for tokens in runs:
        stopped = reader.extend(tokens)
        count += len(tokens) if stopped is None else stopped
        if stopped is not None:
            return count, reader.message.content, reader.stop_string, len(reader.sections)
    reader.finish(ended=False)
    return count, reader.message.content, reader.stop_string, len(reader.sections)


LETTERS = st.text(st.sampled_from("ab"), min_size=4, max_size=12)


@given(
    LETTERS,
    st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3),
    st.integers(0, 6),
    st.lists(st.integers(0, 12), max_size=2),
)
def test_a_stop_string_is_found_at_the_same_token_in_any_cuts(
    text: str, stops: list[str], least: int, cuts: list[int]
):
    def decode(tokens: Sequence[int]) -> str:
        return "".join(text[token] for token in tokens)

    one_by_one, at_once = (plain_reader(decode, stops, least) for _ in range(2))
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    runs = [range(a, b) for a, b in pairwise(places)]
    assert read(at_once, runs) == read(one_by_one, [[token] for token in range(len(text))])


@given(pieces(), st.integers(1, 3), STOPS)
def test_an_end_in_the_middle_of_a_character(case: tuple[str, Pieces], lost: int, stops: list[str]):
    """At the last token allowed the rest is shown, up to a stop string in it."""
    text, tokenizer = case
    cut = Pieces(text.encode()[:-lost], tokenizer.cuts)
    shown, final, _ = run(cut, stops)
    assert "".join(shown) == final
    assert not any(stop in final for stop in stops)


def test_text_is_shown_as_soon_as_it_can_be():
    reader = plain_reader(Pieces("añb END".encode(), [1, 2, 3, 4]).decode, ["END", "STOP"])
    shown = []
    for token in range(4):
        assert reader.extend([token]) is None
        shown.append(fresh(reader))
    assert shown == ["", "", "", ""]  # three characters might begin "STOP"
    assert reader.extend([4]) == 1
    assert fresh(reader) == "añb "


@pytest.mark.parametrize(
    ("stops", "text", "found"),
    [(["b"], "a", "b"), (["abc", "b"], "a", "b"), (["zz"], "abcd", None)],
)
def test_the_first_stop_string_to_be_whole_counts_and_is_named(
    stops: list[str], text: str, found: str | None
):
    reader = plain_reader(Pieces(b"abcd", [1, 2, 3]).decode, stops)
    for token in range(4):
        if reader.extend([token]) is not None:
            break
    else:
        reader.finish(ended=False)
    assert (reader.message.content, reader.stop_string) == (text, found)


def test_the_events_of_a_whole_answer_are_those_of_its_parts_in_one():
    reader = plain_reader(Pieces(b"abcd", [1, 2, 3]).decode, [])
    for token in range(4):
        reader.extend([token])
        assert fresh(reader) == "abcd"[token]
        assert reader.events == (Content("abcd"[: token + 1]),)


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
    reader = plain_reader(lambda tokens: "".join(text[t] for t in tokens), stops, min_tokens)
    for token in range(len(text)):
        if reader.extend([token]) is not None:
            break
    else:
        reader.finish(ended=False)
    assert reader.message.content == expected
