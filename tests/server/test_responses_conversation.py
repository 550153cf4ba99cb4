"""A request for a response as the chat completion that asks for the same."""

import itertools
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import OF_VLLM

from peagle.server.protocol import ChatBody
from peagle.server.responses.body import ResponsesBody
from peagle.server.responses.conversation import chat_fields, encoded
from peagle.server.responses.tools import CustomInput, Tools
from peagle.server.tool_body import NamedTool

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "f", "description": "Does f.", "parameters": SCHEMA}
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "I will."}]}


def chat(**fields: Any) -> dict[str, Any]:
    """The chat completion's fields, which are valid ones."""
    body = ResponsesBody.model_validate_json(json.dumps({"input": "hi", **fields}))
    found = chat_fields(body, Tools(body.tools or ()))
    ChatBody.model_validate(found)
    return found


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(input=list(items), **fields)["messages"]
    return found


def functions(**fields: Any) -> dict[str, Any]:
    """The functions by their names."""
    return {tool["function"]["name"]: tool["function"] for tool in chat(**fields)["tools"]}


def call(identifier: str, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


@pytest.mark.parametrize(("name", "value"), OF_VLLM)
def test_vllms_fields_have_their_effect_here_too(name: str, value: Any):
    assert ChatBody.model_validate(chat(**{name: value})).model_dump(include={name})[name]


def test_instructions_come_before_the_input():
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert chat(instructions="Be brief.")["messages"] == asked
    assert messages(USER, instructions="Be brief.") == asked


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_messages_keep_their_roles_and_texts(role: str):
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    item = {"role": role, "content": parts, "id": "msg_1", "status": "completed"}
    assert messages(item) == [{"role": role, "content": "ab"}]


def test_all_items_of_one_answer_are_one_message():
    thoughts = {"type": "reasoning", "id": "rs_1", "summary": []}
    thoughts["content"] = [{"type": "reasoning_text", "text": "Hm."}]
    patch = {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": 'é"\n'}
    results = [
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {
            "type": "custom_tool_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "two"}],
        },
    ]
    assert messages(USER, thoughts, SAID, CALL, patch, *results, USER) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I will.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("1", "f", "{}"), call("2", "patch", {"input": 'é"\n'})],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "user", "content": "hi"},
    ]


@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_parts_of_a_result_are_lines_and_one_that_is_no_text_is_told(kind: str):
    """A picture of a tool's would otherwise end each session: clients repeat their history."""
    picture = {"type": "input_image", "image_url": "data:image/png;base64,x", "detail": "high"}
    parts = [
        {"type": "input_text", "text": "Output:"},
        {"type": "input_text", "text": "a"},
        picture,
    ]
    told = "Output:\na\n[input_image left out: this model reads only text]"
    found = messages({"type": kind, "call_id": "1", "output": parts})
    assert found == [{"role": "tool", "tool_call_id": "1", "content": told}]


@pytest.mark.parametrize(
    ("item", "thoughts"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}], "summary": []}, "a"),
        ({"encrypted_content": encoded("aé")}, "aé"),
        ({"summary": [{"type": "summary_text", "text": "a"}]}, "a"),
        (
            {
                "encrypted_content": encoded("whole"),
                "summary": [{"type": "summary_text", "text": "a"}],
            },
            "whole",
        ),
        ({"encrypted_content": "gAAAAABpRfnV", "summary": []}, None),
        ({"encrypted_content": "peagle:=?", "summary": []}, None),
        ({"encrypted_content": "peagle:/w==", "summary": []}, None),
    ],
)
def test_thoughts_come_back_in_whatever_form_a_client_keeps_them(item: Any, thoughts: str | None):
    [_, message] = messages(USER, {"type": "reasoning", **item}, SAID)[:2]
    assert message.get("reasoning_content") == thoughts


def test_a_tool_of_a_namespace_is_a_function_with_both_names():
    spaces = [
        {"type": "namespace", "name": "agents", "tools": [FUNCTION]},
        {"type": "namespace", "name": "mcp__docs__", "tools": [FUNCTION]},
    ]
    assert functions(tools=[FUNCTION, *spaces]).keys() == {"f", "agents__f", "mcp__docs__f"}
    said = messages(USER, {**CALL, "namespace": "agents"})
    assert said[1]["tool_calls"] == [call("1", "agents__f", "{}")]


def test_a_function_keeps_its_description_schema_and_strictness():
    kept = {"name": "f", "description": "Does f.", "parameters": SCHEMA, "strict": True}
    assert functions(tools=[{**FUNCTION, "strict": True, "defer_loading": False}]) == {"f": kept}


def test_a_custom_tool_is_a_function_of_one_text_that_is_told_its_grammar():
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    tool = {"type": "custom", "name": "patch", "description": "Patches.", "format": form}
    [function] = functions(tools=[tool]).values()
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("Patches.")
    assert 'start: "x"' in function["description"]


def test_what_runs_elsewhere_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture):
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    with caplog.at_level(logging.WARNING, "peagle.server"):
        for _ in range(2):
            assert messages(USER, searched, tools=[{"type": "an_own_tool_of_this_test"}]) == [
                {"role": "user", "content": "hi"}
            ]
    assert caplog.text.count("an_own_tool_of_this_test") == 1
    assert "tools" not in chat(tools=[{"type": "web_search"}], tool_choice="auto")


@pytest.mark.parametrize(
    ("choice", "wanted", "names"),
    [
        ("required", "required", {"f", "ns__g"}),
        ({"type": "function", "name": "f"}, "f", {"f", "ns__g"}),
        ({"type": "custom", "name": "g", "namespace": "ns"}, "ns__g", {"f", "ns__g"}),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
            },
            "required",
            {"f"},
        ),
    ],
)
def test_choices_of_tools(choice: Any, wanted: str, names: set[str]):
    space = {"type": "namespace", "name": "ns", "tools": [{"type": "custom", "name": "g"}]}
    found = chat(tools=[FUNCTION, space], tool_choice=choice, parallel_tool_calls=False)
    body = ChatBody.model_validate(found)
    given = body.tool_choice
    assert (given.function.name if isinstance(given, NamedTool) else given) == wanted
    assert {tool.function.name for tool in body.tools or ()} == names
    assert body.parallel_tool_calls is False


def test_forms_effort_limits_and_sampling_have_their_names_in_chat_completions():
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    found = chat(
        text={"format": form, "verbosity": "low"},
        reasoning={"effort": "high", "summary": "auto"},
        max_output_tokens=5,
        temperature=0.5,
        top_k=3,
        seed=1,
        stop=["x"],
        chat_template_kwargs={"a": 1},
        speculation={"num_speculative_tokens": 2},
        client_metadata={"a": "b"},
        a_field_of_tomorrow=1,
    )
    assert found.pop("messages")
    assert found.pop("speculation").num_speculative_tokens == 2
    assert found == {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
        },
        "verbosity": "low",
        "reasoning_effort": "high",
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "seed": 1,
        "stop": ["x"],
        "chat_template_kwargs": {"a": 1},
    }


@given(text=st.text(), plain=st.booleans(), spaces=st.booleans(), data=st.data())
def test_a_custom_tools_input_is_read_however_it_comes(
    text: str, plain: bool, spaces: bool, data: st.DataObject
):
    separators = None if spaces else (",", ":")
    arguments = json.dumps({"input": text}, ensure_ascii=plain, separators=separators)
    places = st.lists(st.integers(0, len(arguments)), max_size=9)
    cuts = [0, *sorted(data.draw(places)), len(arguments)]
    reader = CustomInput()
    pieces = [reader.feed(arguments[a:b]) for a, b in itertools.pairwise(cuts)]
    assert "".join(pieces) + reader.finish() == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a", "more": "b"}', "a"),
        ('{"input": "a\\ud83dz\\ude00"}', "a\ufffdz\ufffd"),
        ('{"input": "a\\ud83d\\ud83d\\n"}', "a\ufffd\ufffd\n"),
        ('{"input": "a\\ud83d"}', "a\ufffd"),
        ('{"cmd": "ls"}', '{"cmd": "ls"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
    ],
)
def test_an_input_that_is_cut_or_of_another_form(arguments: str, text: str):
    reader = CustomInput()
    assert reader.feed(arguments) + reader.finish() == text
