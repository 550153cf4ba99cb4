"""Conversations in the form that a template shows, whatever it makes of others."""

from typing import Any

import pytest
from chat_templates import (
    CHATML,
    HARMONY,
    LLAMA,
    NO_DEVELOPER,
    SINGLE_CALL,
    STRICT,
    SYSTEM_LAST,
    assistant,
    byte_tokenizer,
    user,
)
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import InputError
from peagle.models.chat_template import hides_tools, render_chat, template_turns

TEMPLATES = (CHATML, HARMONY, LLAMA, NO_DEVELOPER, SINGLE_CALL, SYSTEM_LAST)


def system(content: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


def developer(content: str) -> dict[str, Any]:
    return system(content, "developer")


def call(name: str, arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def calls(*names: str, **more: Any) -> dict[str, Any]:
    return assistant("", tool_calls=[call(name, id=f"id-{name}") for name in names], **more)


def result(of: str | None, content: str) -> dict[str, Any]:
    named = {} if of is None else {"tool_call_id": f"id-{of}"}
    return {"role": "tool", "content": content, **named}


def shown(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    return render_chat(byte_tokenizer(template), messages, **variables)


def called(arguments: Any) -> dict[str, Any]:
    return assistant("", tool_calls=[call("f", arguments)])


CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }} SHOWN{% endfor %}|{% endfor %}"
)
PAIRS = CALLS.replace(
    "SHOWN", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}"
)
"""As Qwen3-Coder's: fails on text."""
JSON = CALLS.replace("SHOWN", "{{ c.function.arguments | tojson }}")
AS_GIVEN = CALLS.replace(
    "SHOWN",
    "{% set given = c.function.arguments %}{{ given if given is string else given | tojson }}",
)
"""As Qwen3's."""
TEXT_ALONE = CALLS.replace("SHOWN", "{{ '```' + c.function.arguments + '```' }}")
"""As DeepSeek-V3's: fails on an object."""
DEEP = '{"a": ' + "[" * 5000


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"x": [1], "y": "é"}', {"x": [1], "y": "é"}),
        ("{}", {}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (None, {}),
        ({"x": None}, {"x": None}),
        ("no JSON", "no JSON"),
        ("[1]", "[1]"),
        ([1], "[1]"),
        (False, "false"),
        ('{"a": "cut', '{"a": "cut'),
        (DEEP, DEEP),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_the_arguments_of_a_call_become_an_object_if_they_can(given: Any, read: Any):
    message = called(given)
    [turn] = template_turns([message], AS_GIVEN)
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": read}
    assert message == called(given), "what was given is as it was"


@pytest.mark.parametrize(
    ("given", "pairs", "text"),
    [
        ('{"a": 1}', "a=1;", '{"a": 1}'),
        ({"a": 1}, "a=1;", '{"a": 1}'),
        ("", "", "{}"),
        ("null", "", "{}"),
        (None, "", "{}"),
        ('{"a": 1, "b": "cut of', 'a=1;b="cut of";', '{"a": 1, "b": "cut of'),
        ('{"a": 1} and more', "a=1;", '{"a": 1} and more'),
        ("no JSON", "", "no JSON"),
        ("[1, 2]", "", "[1, 2]"),
        ([1, 2], "", "[1, 2]"),
        (5, "", "5"),
        (r'{"a": "\ud83d"}', "", r'{"a": "\ud83d"}'),
        (DEEP, "", DEEP),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_no_template_refuses_a_history_for_the_arguments_of_a_call(
    given: Any, pairs: str, text: str
):
    """Each further request repeats them."""
    for template, wanted in ((PAIRS, f"f {pairs}"), (TEXT_ALONE, f"f ```{text}```")):
        assert shown(template, user("q"), called(given), user("go on")) == f"q|{wanted}|go on|"
    for template in (*TEMPLATES, JSON, AS_GIVEN):
        assert "go on" in shown(template, user("q"), called(given), user("go on"))


def test_a_call_without_arguments_has_none():
    message = assistant("", tool_calls=[{"function": {"name": "f"}}])
    [turn] = template_turns([message], CHATML)
    assert turn["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("odd", ["f", ["f", {"function": "f"}, {"name": "f", "arguments": "{}"}]])
def test_calls_of_another_shape_stay(odd: Any):
    message = assistant("a", tool_calls=odd)
    assert template_turns([message], CHATML) == [message]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "image"}, {"type": "text", "text": "b"}], None),
        (["a"], None),
    ],
)
def test_parts_of_text_are_one_text(content: Any, text: str | None):
    message = {"role": "user", "content": content}
    assert template_turns([message], CHATML) == [message if text is None else user(text)]


@pytest.mark.parametrize("nothing", [[], None])
def test_no_calls_are_no_key(nothing: Any):
    """Some templates ask only whether it is there."""
    message = assistant("a", tool_calls=nothing)
    assert "tool_calls" not in template_turns([message], CHATML)[0]
    assert "a" in shown(SINGLE_CALL, user("q"), message)
    assert "a" in shown(HARMONY, user("q"), message)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_thoughts_have_the_names_that_templates_read(name: str):
    [turn] = template_turns([assistant("a", **{name: "hm"})], CHATML)
    assert turn == assistant("a", reasoning_content="hm", thinking="hm")


def test_a_developer_is_the_system_where_the_template_does_not_know_one():
    for template in (NO_DEVELOPER, CHATML, LLAMA):
        wanted = shown(template, system("Be brief."), user("q"))
        assert shown(template, developer("Be brief."), user("q")) == wanted
    assert template_turns([developer("a"), user("b")], HARMONY)[0]["role"] == "developer"


def test_a_developer_in_the_middle_is_the_system_too():
    text = shown(NO_DEVELOPER, user("q"), assistant("a"), developer("now French"), user("r"))
    assert text.index("now French") > text.index("a<|im_end|>")
    assert "<|im_start|>system\nnow French" in text


@pytest.mark.parametrize("template", TEMPLATES)
def test_several_instructions_at_the_start_are_one(template: str):
    apart = shown(template, system("one"), developer("two"), system("three"), user("q"))
    assert apart == shown(template, system("one\n\ntwo\n\nthree"), user("q"))
    assert "three" in apart


@pytest.mark.parametrize("template", [HARMONY, SYSTEM_LAST])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_later_instruction_that_would_be_dropped_moves_to_the_start(template: str, role: str):
    turns = [user("q"), assistant("a"), system("new", role), user("r")]
    for head in ([], [system("old")]):
        text = shown(template, *head, *turns)
        joined = "\n\n".join([*(turn["content"] for turn in head), "new"])
        assert text == shown(template, system(joined), user("q"), assistant("a"), user("r"))
        assert text.count("new") == 1


@pytest.mark.parametrize("template", [CHATML, LLAMA, NO_DEVELOPER, SINGLE_CALL])
def test_a_later_instruction_that_is_shown_stays(template: str):
    turns = [system("old"), user("one"), assistant("two"), system("new"), user("three")]
    places = [shown(template, *turns).index(turn["content"]) for turn in turns]
    assert places == sorted(places)


@pytest.mark.parametrize("template", [HARMONY, SINGLE_CALL])
def test_calls_that_a_template_takes_one_at_a_time_are_told_apart(template: str):
    turns = [user("q"), calls("f", "g"), result("g", "of g"), result("f", "of f"), user("r")]
    text = shown(template, *turns)
    apart = [user("q"), calls("f"), result("f", "of f"), calls("g"), result("g", "of g"), user("r")]
    assert text == shown(template, *apart)
    assert "of f" in text
    assert "of g" in text


def test_calls_that_a_template_shows_together_stay_together():
    turns = [user("q"), calls("f", "g"), result("f", "1"), result("g", "2")]
    assert template_turns(turns, NO_DEVELOPER) == [
        *turns[:1],
        assistant("", tool_calls=[call(name, {}, id=f"id-{name}") for name in "fg"]),
        *turns[2:],
    ]
    assert len(template_turns(turns, CHATML)) == 4, "which shows no call at all"


@given(
    names=st.permutations(["id-f", "id-g", "id-h", None]),
    count=st.integers(0, 4),
    later=st.booleans(),
)
def test_no_call_and_no_result_is_lost(names: list[str | None], count: int, later: bool):
    results = [
        {"role": "tool", "content": f"r{n}", **({"tool_call_id": name} if name else {})}
        for n, name in enumerate(names[:count])
    ]
    turns = [user("q"), calls("f", "g", "h"), *results, *([user("r")] if later else [])]
    found = template_turns(turns, SINGLE_CALL)
    assert [c["function"]["name"] for turn in found for c in turn.get("tool_calls", ())] == [*"fgh"]
    assert sorted(turn["content"] for turn in found if turn["role"] == "tool") == sorted(
        turn["content"] for turn in results
    )
    assert template_turns(found, SINGLE_CALL) == found, "once is enough"


def test_what_is_said_before_calls_stays_before_the_first():
    first, second = template_turns(
        [assistant("so", reasoning="hm", tool_calls=calls("f", "g")["tool_calls"])], SINGLE_CALL
    )
    assert (first["content"], first["reasoning_content"]) == ("so", "hm")
    assert (second["content"], second.keys() & {"reasoning_content"}) == ("", set())


def test_thoughts_and_text_of_a_call_are_one_where_the_template_takes_only_one():
    message = {**calls("f"), "content": "I look.", "reasoning": "hm"}
    assert "hm\n\nI look." in shown(HARMONY, user("q"), message)
    [turn] = template_turns([message], NO_DEVELOPER)
    assert (turn["content"], turn["reasoning_content"]) == ("I look.", "hm")


def test_a_tool_without_a_description_gets_an_empty_one_where_the_template_needs_it():
    tool = {"type": "function", "function": {"name": "f"}}
    assert "// \n" in shown(HARMONY, user("q"), tools=[tool])
    assert tool["function"] == {"name": "f"}
    assert "description" not in shown(LLAMA, user("q"), tools=[tool])


@pytest.mark.parametrize(
    ("template", "hidden"), [(CHATML, True), (LLAMA, False), (HARMONY, False), (None, False)]
)
def test_a_template_that_shows_no_tools_is_known(template: str | None, hidden: bool):
    assert hides_tools(byte_tokenizer(template), None) == hidden
    assert hides_tools(byte_tokenizer(None), template) == hidden


def test_an_answer_goes_on_where_its_beginning_ends():
    begun = [user("q"), assistant("It is")]
    assert shown(CHATML, *begun, continue_final_message=True).endswith("assistant\nIt is")
    assert shown(CHATML, *begun).endswith("It is<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user("q"), called("{}"), {"role": "user"}, user("x")], r"messages.2: the chat template"),
        ([{"role": "user"}], r"^the chat template refuses this: no content"),
    ],
)
def test_what_a_template_refuses_is_named(messages: list[dict[str, Any]], words: str):
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments | items %}{{ k }}{% endfor %}{% endfor %}"
        "{% if m.role == 'user' and not m.content %}{{ raise_exception('no content') }}{% endif %}"
        "{% endfor %}"
    )
    with pytest.raises(InputError, match=words):
        shown(template, *messages)


def test_the_refused_message_is_counted_as_it_was_given():
    """Though several were merged before it."""
    late = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with pytest.raises(InputError, match=r"^messages.3: the chat template refuses this: no$"):
        shown(late, system("a"), system("b"), user("c"), user("bad"), user("d"))
    with pytest.raises(InputError, match=r"^messages.0: .*begin with user$"):
        shown(STRICT, system("a"), user("c"))


def test_of_several_templates_the_one_for_tools_shows_tools():
    tokenizer = byte_tokenizer(None)
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tool = {"type": "function", "function": {"name": "f", "description": ""}}
    assert render_chat(tokenizer, [user("q")]) == "plain"
    assert render_chat(tokenizer, [user("q")], tools=[tool]) == "with tools"
    assert render_chat(tokenizer, [user("q")], tools=[]) == "plain"
    tokenizer.chat_template = {"rag": "with documents"}
    with pytest.raises(InputError, match=r"^tiny: .*default"):
        render_chat(tokenizer, [user("q")])


QUESTION = "{% for m in messages %}{{ m.content }}{% endfor %}"
THREE_EFFORTS = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}"
    "{{ raise_exception('no such effort') }}{% endif %}{{ reasoning_effort }} " + QUESTION
)
NAMED = "{% if reasoning_effort == 'max' %}hard {% endif %}" + QUESTION
WRITTEN = "Reasoning: {{ reasoning_effort | default('medium') }} " + QUESTION


@pytest.mark.parametrize(
    ("template", "asked", "expected"),
    [
        (THREE_EFFORTS, "high", "medium x"),
        (THREE_EFFORTS, "minimal", "low x"),
        (THREE_EFFORTS, "max", "xhigh x"),
        (THREE_EFFORTS, "none", "low x"),
        (NAMED, "high", "hard x"),
        (NAMED, None, "x"),
        (WRITTEN, "minimal", "Reasoning: low x"),
        (WRITTEN, "xhigh", "Reasoning: high x"),
        (WRITTEN, "own", "Reasoning: own x"),
        (QUESTION, "high", "x"),
    ],
)
def test_an_effort_is_the_nearest_that_the_template_knows(
    template: str, asked: str | None, expected: str
):
    given = {} if asked is None else {"reasoning_effort": asked}
    assert shown(template, user("x"), **given) == expected
