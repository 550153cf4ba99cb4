"""What each family writes, read: thoughts, content and calls, however the tokens come."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from families import FAMILIES, Calls, encode, prompt, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import ChatConfig
from peagle.detokenizer import detokenizers
from peagle.dialects.detection import find_dialect
from peagle.dialects.events import CallBegin, CallEnd, Event, Message
from peagle.dialects.gemma4 import Gemma4Calls
from peagle.dialects.json_calls import HermesCalls
from peagle.dialects.pythonic import PythonicCalls
from peagle.dialects.qwen3_coder import Qwen3CoderCalls
from peagle.dialects.reader import Reader
from peagle.dialects.sections import CallFormat
from peagle.dialects.tools import Tool, ToolUse
from peagle.stop_strings import StopStrings

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
USE = ToolUse((Tool("get_weather", SCHEMA), Tool("now")))
CALL = ("get_weather", {"city": "Paris", "days": 2})
NAMES = pytest.mark.parametrize("name", FAMILIES)
TEXT = st.text(st.sampled_from("ab {}\"'\\\n;é世=:<>[]()_"), min_size=1, max_size=12)
WORDS = TEXT.map(lambda text: f"a{text}b")
"""Text without white space at its edges, which dialects may drop."""
ARGUMENTS = st.fixed_dictionaries(
    {"city": TEXT},
    optional={
        "days": st.integers(-99, 99),
        "exact": st.booleans(),
        "tags": st.lists(WORDS, max_size=2),
    },
)


def reader_of(name: str, use: ToolUse | None = USE, stop: Sequence[str] = ()) -> Reader:
    """A reader of an answer in a family's form."""
    tokenizer_, before = tokenizer(name), prompt(name)
    dialect = find_dialect(tokenizer_, ChatConfig())
    return Reader(
        dialect.parser(before, use),
        dialect.markers(use),
        detokenizers(tokenizer_, skip_special=True)(before),
        StopStrings(stop) if stop else None,
    )


def read(
    name: str,
    tokens: Sequence[int],
    cuts: Sequence[int] = (),
    use: ToolUse | None = USE,
    ended: bool = True,
    stop: Sequence[str] = (),
) -> Message:
    """An answer that comes in chunks; its stream is checked against the whole."""
    reader = reader_of(name, use, stop)
    streamed: list[Event] = []
    for start, end in pairwise([0, *sorted(cuts), len(tokens)]):
        if reader.extend(tokens[start:end]) is not None:
            break
        streamed += reader.fresh()
    else:
        reader.finish(ended)
    streamed += reader.fresh()
    folded = Message()
    for event in streamed:
        folded.add(event)
    assert folded == reader.message
    return reader.message


def said(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    """A message without ids, its arguments as values."""
    calls = [(call.name, json.loads(call.arguments or "null")) for call in message.calls]
    return message.reasoning, message.content, calls


def answer(name: str, thoughts: str, content: str, calls: Calls) -> tuple[str, tuple[Any, ...]]:
    """How a family writes an answer, and what is to be read of it."""
    family = FAMILIES[name]
    thoughts = thoughts if family.thinks else ""
    content = content if family.talks or not calls else ""
    return family.write(thoughts, content, calls), (thoughts, content, list(calls))


@NAMES
@pytest.mark.parametrize("thoughts", ["", "Let me think.\n\nSo."])
@pytest.mark.parametrize("content", ["", "It is 4."])
@pytest.mark.parametrize("calls", [(), (CALL,), (CALL, ("now", {}))])
def test_every_family_is_read_as_it_is_written(
    name: str, thoughts: str, content: str, calls: Calls
):
    if FAMILIES[name].begun:
        thoughts = thoughts or "Its prompt has begun them."
    text, expected = answer(name, thoughts, content, calls)
    message = read(name, encode(name, text))
    assert said(message) == expected
    assert all(call.complete for call in message.calls)
    assert len({call.id for call in message.calls}) == len(calls)


@NAMES
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_an_answer_is_the_same_however_it_is_cut_into_chunks(name: str, data: st.DataObject):
    thoughts = data.draw(WORDS)
    content = data.draw(st.just("") | WORDS)
    calls = data.draw(st.lists(st.tuples(st.just("get_weather"), ARGUMENTS), max_size=2))
    text, expected = answer(name, thoughts, content, calls)
    tokens = encode(name, text)
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=9))
    whole, by_token = read(name, tokens), read(name, tokens, range(1, len(tokens)))
    assert said(whole) == said(by_token) == said(read(name, tokens, cuts)) == expected


@NAMES
@settings(max_examples=40)
@given(data=st.data())
def test_a_stop_string_ends_the_content_at_the_same_place_in_any_chunks(
    name: str, data: st.DataObject
):
    text, _ = answer(name, "So, no.", "It is 4. No.\n\n5.\n", [CALL])
    tokens = encode(name, text)
    stops = data.draw(st.lists(st.sampled_from(["4", ".", "\n\n", "No", "\n", "o.\n"]), min_size=1))
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=9))
    by_token = read(name, tokens, range(1, len(tokens)), stop=stops)
    assert said(read(name, tokens, cuts, stop=stops)) == said(by_token)


@NAMES
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_whatever_is_written_is_read_alike_in_chunks_and_nothing_is_raised(
    name: str, data: st.DataObject
):
    """Marker tokens in any order, and answers cut anywhere."""
    tokens = st.sampled_from(sorted(tokenizer(name).get_added_vocab().values()))
    text, _ = answer(name, "Hm.", "Yes.", [CALL])
    pieces = st.lists(tokens.map(lambda token: [token]) | TEXT.map(lambda t: encode(name, t)))
    written = encode(name, text)
    begun = written[: data.draw(st.integers(0, len(written)))]
    garbled = [*begun, *(token for piece in data.draw(pieces) for token in piece)]
    ended = data.draw(st.booleans())
    whole = read(name, garbled, ended=ended)
    by_token = read(name, garbled, range(1, len(garbled)), ended=ended)
    for message in (whole, by_token):
        for call in message.calls:
            call.id = ""
    assert whole == by_token


@NAMES
def test_a_call_that_a_limit_cuts_stays_as_far_as_it_was_shown(name: str):
    text, _ = answer(name, "Hm.", "", [("get_weather", {"city": "Paris and Rome"})])
    tokens = encode(name, text)
    whole = read(name, tokens).calls[0]
    for end in range(len(tokens)):
        message = read(name, tokens[:end], ended=False)
        if message.calls:
            assert whole.arguments.startswith(message.calls[0].arguments)
        assert "tool_call>" not in message.content


@NAMES
def test_stop_strings_act_on_the_content_alone(name: str):
    """Thoughts and calls may hold them."""
    thoughts = "stop" if FAMILIES[name].thinks else ""
    text, _ = answer(name, thoughts, "It is stop here.", [])
    message = read(name, encode(name, text), stop=["stop"])
    assert (message.reasoning, message.content) == (thoughts, "It is ")
    text, expected = answer(name, "Hm.", "", [("get_weather", {"city": "stop"})])
    assert said(read(name, encode(name, text), stop=["stop"])) == expected


@NAMES
def test_without_tools_a_call_is_content(name: str):
    text, _ = answer(name, "Hm.", "", [CALL])
    message = read(name, encode(name, text), use=None)
    assert not message.calls
    assert "Paris" in message.content


@pytest.mark.parametrize("name", ["qwen3", "qwen3-coder", "gemma4", "plain"])
def test_what_is_no_call_between_its_markers_is_content(name: str, caplog):
    markers = (
        ("<|tool_call>", "<tool_call|>") if name == "gemma4" else ("<tool_call>", "</tool_call>")
    )
    message = read(name, encode(name, "nothing to call".join(markers)))
    assert "nothing to call" in message.content
    assert not message.calls
    assert "cannot be read" in caplog.text


NO_CALLS = [
    "[now(a=...)]",
    "[now(a=b'x')]",
    "[now(a={1})]",
    "[now(a={{'x': 1}})]",
    "[now(a=1j)]",
    "[now(a=1e999)]",
    "[now(**{'a': 1})]",
    "[now(1)]",
    "[now(a=1, a=2)]",
    "[now(a=now())]",
    "[now()(a=1)]",
    "[now(a=1) + 1]",
]
"""Python that is no list of calls with JSON's values."""


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama3.1", '{"name": "now", "parameters": {}}'),
        ("llama3.2", "[now()]"),
    ],
)
def test_text_behind_a_bare_call_is_content_as_it_comes(name: str, call: str):
    """So that a stop string in it is met."""
    text = f"{call} and then STOP{' more' * 20}"
    thoughts, content, calls = said(read(name, encode(name, text), stop=["STOP"]))
    assert (thoughts, content.strip(), calls) == ("", "and then", [("now", {})])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('"""print("a]")"""', 'print("a]")'),
        ("'''it's'''", "it's"),
        ("''", ""),
        ("'a' 'b'", "ab"),
        ("'a\n\tb\\n'", "a\n\tb\n"),
        ('"\\ud83d\\ude00 \\ud800"', "😀 \ufffd"),
    ],
)
def test_pythonic_strings_of_every_kind(written: str, meant: str):
    tokens = encode("llama3.2", f"[now\n(a={written})\r\n]")
    for cuts in ([], [*range(1, len(tokens))]):
        assert said(read("llama3.2", tokens, cuts)) == ("", "", [("now", {"a": meant})])


def test_surplus_calls_are_left_out():
    name, use = "qwen3", ToolUse(USE.tools, most=1)
    text, _ = answer(name, "Hm.", "", [CALL, ("now", {})])
    dialect, before = find_dialect(tokenizer(name), ChatConfig()), prompt(name)
    reader = Reader(
        dialect.parser(before, use),
        dialect.markers(use),
        detokenizers(tokenizer(name), skip_special=True)(before),
        most_calls=use.most,
    )
    reader.extend(encode(name, text))
    reader.finish(ended=True)
    assert said(reader.message) == ("Hm.", "", [CALL])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama3.1", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}'),
        ("llama3.1", '{"answer": 4}', '{"answer": 4}'),
        ("llama3.2", "[other(a=1)]", "[other(a=1)]"),
        ("llama3.2", "[1, 2]", "[1, 2]"),
        *(("llama3.2", text, text) for text in NO_CALLS),
        ("gpt-oss", "No header at all.", "No header at all."),
        ("gpt-oss", "<|channel|>final<|message|>4<|end|>, I think", "4\n, I think"),
        ("gpt-oss", '<|channel|>final <|constrain|>json<|message|>{"a": 1}', '{"a": 1}'),
        ("qwen3", "To think, write <think> first.", "To think, write <think> first."),
    ],
)
def test_what_only_looks_like_a_call_or_a_thought_is_content(name: str, text: str, expected: str):
    assert said(read(name, encode(name, text))) == ("", expected, [])


@pytest.mark.filterwarnings("ignore")  # of Python's about escapes, which pytest asks for
def test_a_pythonic_call_may_hold_brackets_quotes_and_dashes():
    text = """[now(), get_weather(city='it\\'s ]) "', days=[1, (2, -3.5)], more={"a": true}),
    get-time(place="\\d")]"""
    asked = {"city": "it's ]) \"", "days": [1, [2, -3.5]], "more": {"a": True}}
    calls = [("now", {}), ("get_weather", asked), ("get-time", {"place": "\\d"})]
    assert said(read("llama3.2", encode("llama3.2", text))) == ("", "", calls)


@pytest.mark.parametrize(
    ("calls", "parts"),
    [
        (PythonicCalls(), ["[now(a=[", *["[1],"] * 8000, "])]"]),
        (HermesCalls(), ['{"name": "', *["abcd"] * 20_000, '", "arguments": {}}']),
        (Gemma4Calls(), ["call:", *[" "] * 8000, "now{}"]),
        (
            Qwen3CoderCalls(),
            [
                "<function=now>\n<parameter=a>\n[",
                *["1, "] * 12_000,
                "1]\n</parameter>\n</function>",
            ],
        ),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_long_calls_are_read_as_fast_as_they_are_written(calls: CallFormat, parts: list[str]):
    """In the time of engines' steps: what is held is not read anew with each token."""
    numbers = {"properties": {"a": {"type": "array"}}}
    reader = calls.reader(ToolUse((Tool("now", numbers),)), marked=True)
    began = time.process_time()
    events = [event for part in parts for event in reader.feed(part)]
    events += reader.finish()
    assert time.process_time() - began < 3.0
    assert isinstance(events[0], CallBegin)
    assert isinstance(events[-1], CallEnd)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("call:now{} and more", [("now", {})], "<|tool_call> and more<tool_call|>"),
        ("call:now{a:1}call:now{a:2}", [("now", {"a": 1}), ("now", {"a": 2})], ""),
        (
            "call:f{city:New York,at:10:30,of:[a b,1, true],u:https://a.b/c}",
            [
                (
                    "f",
                    {"city": "New York", "at": "10:30", "of": ["a b", 1, True]}
                    | {"u": "https://a.b/c"},
                )
            ],
            "",
        ),
        ("call:f{a:{b:[{c:1}]},d:2}", [("f", {"a": {"b": [{"c": 1}]}, "d": 2})], ""),
    ],
)
def test_gemmas_calls_are_the_same_in_any_chunks(
    text: str, calls: list[Any], content: str, caplog: pytest.LogCaptureFixture
):
    tokens = encode("gemma4", f"<|tool_call>{text}<tool_call|>")
    for cut in range(len(tokens)):
        assert said(read("gemma4", tokens, [cut] if cut else [])) == ("", content, calls)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-coder", "gemma4"])
def test_what_a_limit_cuts_of_no_call_stays(name: str):
    """A marker that only stands in a text loses nothing of what follows."""
    marker = {"gemma4": "<|tool_call>"}.get(name, "<tool_call>")
    text = f"Here: {marker}is a tag of a family, explained at length"
    found = said(read(name, encode(name, text), ended=False))
    assert found == ("", text.replace(": <", ":<"), [])


def test_a_value_whose_call_is_left_open_keeps_no_tag():
    text = "<tool_call>\n<function=f>\n<parameter=p>\nv\n</parameter>\n</tool_call>"
    assert said(read("qwen3-coder", encode("qwen3-coder", text))) == ("", "", [("f", {"p": "v"})])


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.now <|constrain|>json",
        "<|channel|>commentary to=functions.now json",
        "<|channel|>commentary to=now <|constrain|>json",
        "<|channel|>analysis to=now code",
        " to=now<|channel|>commentary json",
        "<|channel|>final to=now",
        "<|channel|>commentary <|constrain|>json to=now",
        "<|channel|>analysis to=functions.now code",
        " to=functions.now<|channel|>commentary json",
        " to=functions.now<|channel|>commentary <|constrain|>json",
    ],
)
def test_every_header_of_a_harmony_call_is_known(header: str):
    message = read("gpt-oss", encode("gpt-oss", f"{header}<|message|>{{}}"))
    assert said(message) == ("", "", [("now", {})])


def test_what_harmony_says_to_other_tools_is_hidden():
    text = "<|channel|>analysis to=python code<|message|>1+1<|end|><|start|>assistant"
    message = read("gpt-oss", encode("gpt-oss", f"{text}<|channel|>final<|message|>2"))
    assert said(message) == ("", "2", [])


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>',
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        '<tool_call>{"type": "function", "name": "get_weather", "parameters": {"city": "Rome"}}'
        "</tool_call>",
        '<tool_call>{"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}'
        "</tool_call>",
    ],
)
def test_json_calls_may_have_their_keys_in_any_order(written: str):
    assert said(read("qwen3", encode("qwen3", written)))[2] == [("get_weather", {"city": "Rome"})]


def test_a_tagged_call_may_lack_its_markers_and_hold_tags():
    text = "<function=get_weather>\n<parameter=city>\na</parameter> b\n</parameter>\n</function>"
    calls = [("get_weather", {"city": "a</parameter> b"})]
    assert said(read("qwen3-coder", encode("qwen3-coder", text)))[2] == calls
    left_open = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</tool_call>"
    message = read("qwen3-coder", encode("qwen3-coder", left_open))
    assert said(message)[2] == [("get_weather", {"city": "Rome"})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "See <tool_call>what?"),
        ("qwen3", "See <tool_call>what?</tool_call>"),
        ("qwen3-coder", "1 <<tool_call>what?"),
        ("qwen3-coder", "Write <function=f-"),
        ("gemma4", "See <|tool_call>what?"),
    ],
)
def test_what_is_no_call_is_content_as_it_was_written(name: str, text: str):
    """Without an end that never came, and in its order."""
    message = read(name, encode(name, text))
    assert ("".join(message.content.split()), message.calls) == ("".join(text.split()), [])


POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "name": {"type": "string"}}}
NESTED = {
    "type": "object",
    "properties": {
        "point": {"$ref": "#/$defs/Point"},
        "limit": {"$ref": "#/$defs/Limit"},
        "points": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
        "maybe": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "none": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "all": {"allOf": [{"$ref": "#/$defs/Point"}]},
        "mode": {"enum": [1, 2]},
        "on": {"const": True},
        "bare": {"items": {"type": "integer"}},
        "text": {"type": "string"},
    },
}
DEFINITIONS = {"Point": POINT, "Limit": {"type": "integer"}, "Arguments": NESTED}
VALUES = {
    "point": {"x": 1, "name": "10"},
    "limit": 10,
    "points": [{"x": 2}, {"name": "true"}],
    "maybe": {"x": 3},
    "none": None,
    "all": {"x": 4},
    "mode": 2,
    "on": True,
    "bare": [1, 2],
    "text": "null",
}


@NAMES
@pytest.mark.parametrize(
    "root",
    [
        NESTED,
        {"$ref": "#/$defs/Arguments"},
        {"allOf": [{"$ref": "#/$defs/Arguments"}, {"required": ["point"]}]},
        {"anyOf": [{"$ref": "#/$defs/Arguments"}, {"type": "object", "properties": {"x": {}}}]},
    ],
    ids=["plain", "by reference", "in allOf", "in anyOf"],
)
def test_nested_arguments_arrive_with_their_types(name: str, root: dict[str, Any]):
    use = ToolUse((Tool("f", {**root, "$defs": DEFINITIONS}),))
    text, expected = answer(name, "Hm.", "", [("f", VALUES)])
    tokens = encode(name, text)
    for cuts in ([], [*range(1, len(tokens))], [len(tokens) // 2]):
        assert said(read(name, tokens, cuts, use)) == expected


def marked_texts(name: str) -> list[str]:
    """Texts that tell of each of a family's markers."""
    dialect = find_dialect(tokenizer(name), ChatConfig())
    markers = dialect.markers(USE)
    names = sorted({*markers.ids.values(), *markers.spelled} - {'<|"|>'})
    return [text for one in names for text in (f"close with {one} please", one, f"a{one}b{one}")]


@NAMES
def test_a_marker_within_an_argument_is_text_of_it(name: str):
    for text in marked_texts(name):
        calls = [("get_weather", {"city": text, "tags": [text]}), ("now", {})]
        written, expected = answer(name, "Hm.", "", calls)
        tokens = encode(name, written)
        for cuts in ([], [*range(1, len(tokens))]):
            assert said(read(name, tokens, cuts)) == expected, text


EXAMPLE = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
TOLD = [
    EXAMPLE,
    f"{EXAMPLE}\n{EXAMPLE}",
    f"First:\n{EXAMPLE}\nand more.",
    "write <function=f> and <parameter=p>, then\n</parameter>\nand </function>.",
    "a </parameter> b <tool_call> c",
    "\n</parameter>\n</function>\nthen more",
    "</tool_call>\n",
]
"""Texts that tell of calls as Qwen3-Coder writes them."""


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("name", ["qwen3-coder", "qwen3.5"])
def test_a_text_that_tells_of_calls_does_not_end_its_own(name: str, told: str):
    last = ("get_weather", {"days": 2, "city": told})
    first = ("get_weather", {"city": told, "days": 2})
    for calls in ([last], [first], [last, ("now", {})], [first, last]):
        text, expected = answer(name, "Hm.", "", calls)
        tokens = encode(name, text)
        for cuts in ([], [*range(1, len(tokens))]):
            assert said(read(name, tokens, cuts)) == expected


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("<function=f>\n<parameter=p>\nv\n</tool_call>", [("f", {"p": "v"})], ""),
        (
            "<function=f>\n<parameter=p>\nv\n</tool_call>\n<tool_call>\n<function=now>\n</function>",
            [("f", {"p": "v"}), ("now", {})],
            "",
        ),
        (
            "<function=f>\n<parameter=p>\nv\n</parameter>\n</function>\n<function=now></function>",
            [("f", {"p": "v"}), ("now", {})],
            "",
        ),
        (
            "<function=f>\n<parameter=p>\nv\n</parameter>\n</function>\n</tool_call>\nI wait.",
            [("f", {"p": "v"})],
            "I wait.",
        ),
        ('<function=f>\n{"p": "v"}\n</function>', [("f", {"p": "v"})], ""),
    ],
)
def test_tagged_calls_that_are_closed_in_another_way(text: str, calls: Any, content: str):
    tokens = encode("qwen3-coder", f"<tool_call>\n{text}")
    for cuts in ([], [*range(1, len(tokens))]):
        assert said(read("qwen3-coder", tokens, cuts)) == ("", content, calls)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('say <|"|>hi<|"|> now', 'say "hi" now'),
        ('<|"|>', '"'),
        ('a\\d "b"\n\t', 'a\\d "b"\n\t'),
    ],
)
def test_gemmas_strings_hold_what_quotes_them(written: str, meant: str):
    text = f'<|tool_call>call:f{{text:<|"|>{written}<|"|>,n:True,m:None}}<tool_call|>'
    tokens = encode("gemma4", text)
    for cuts in ([], [*range(1, len(tokens))]):
        found = said(read("gemma4", tokens, cuts))
        assert found == ("", "", [("f", {"text": meant, "n": True, "m": None})])


THOUGHTS = {
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "qwen3-thinking": ("", "\n</think>\n\n"),
    "qwen3.5": ("", "\n</think>\n\n"),
    "gemma4": ("<|channel>thought\n", "\n<channel|>"),
}
"""What begins an answer's thoughts, and what ends them."""


@pytest.mark.parametrize("name", THOUGHTS)
def test_calls_within_thoughts_that_nothing_ends_are_made(name: str):
    begin, end = THOUGHTS[name]
    calls = [CALL, ("now", {})]
    written = FAMILIES[name].write("", "", calls)
    marker = written.partition("tool_call")[0] + "tool_call>"
    cases = [
        (f"{begin}I call.\n{written}", True, ("I call.", "", calls)),
        (f"{begin}{written}", True, ("", "", calls)),
        (
            f"{begin}Perhaps {written} later.{end}It is 4.",
            True,
            (f"Perhaps {written} later.", "It is 4.", []),
        ),
        (f"{begin}Perhaps {written}{end}{written}", True, (f"Perhaps {written}", "", calls)),
        (f"{begin}The tag {marker} begins", True, (f"The tag {marker} begins", "", [])),
        (
            f"{begin}The tag {marker} begins it.\n{written}",
            True,
            (f"The tag {marker} begins it.", "", calls),
        ),
        (f"{begin}I call.\n{written}", False, (f"I call.\n{written}", "", [])),
    ]
    for text, ended, expected in cases:
        tokens = encode(name, text)
        for cuts in ([], [*range(1, len(tokens))], [len(tokens) // 2]):
            assert said(read(name, tokens, cuts, ended=ended)) == expected


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_that_only_name_a_marker_are_shown_as_they_come(name: str):
    written = FAMILIES[name].write("", "", [("now", {})])
    marker = written.partition("tool_call")[0] + "tool_call>"
    reader = reader_of(name)
    reader.extend(encode(name, f"{THOUGHTS[name][0]}The tag {marker} begins it, and"))
    assert reader.message.reasoning == f"The tag {marker} begins it, and"


@NAMES
def test_a_call_that_the_model_breaks_off_is_not_complete(name: str):
    written = FAMILIES[name].write("", "", [("get_weather", {"city": "Paris and Rome"})])
    text = ("Hm.</think>" if FAMILIES[name].begun else "") + written[: written.index(" Rome")]
    message = read(name, encode(name, text))
    assert not any(call.complete for call in message.calls)


@pytest.mark.parametrize(
    ("arguments", "calls", "content"),
    [
        ("", [("now", {})], ""),
        ('{"a": True}', [("now", {"a": True})], ""),
        ('{"a": "x\ny"', [("now", {"a": "x\ny"})], ""),
        ("[1]", [], "[1]"),
    ],
)
def test_arguments_in_harmony_that_are_no_json(arguments: str, calls: Any, content: str):
    text = f"<|channel|>commentary to=now<|message|>{arguments}"
    tokens = encode("gpt-oss", text)
    for cuts in ([], [*range(1, len(tokens))]):
        assert said(read("gpt-oss", tokens, cuts)) == ("", content, calls)
