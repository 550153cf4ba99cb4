"""A request for a message as the chat completion that asks for the same."""

import json
from typing import Any

import pytest
from pydantic import ValidationError
from served import OF_VLLM

from peagle.server.anthropic.body import MessagesBody, chat_fields
from peagle.server.body_route import validated
from peagle.server.protocol import ChatBody

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
TOOL = {"name": "f", "description": "Does f.", "input_schema": SCHEMA}
FUNCTION = {"name": "f", "description": "Does f.", "parameters": SCHEMA}
ASKED = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    """The chat completion's fields, which are valid ones."""
    body = MessagesBody.model_validate_json(json.dumps({"messages": [ASKED], **fields}))
    found = chat_fields(body)
    ChatBody.model_validate(found)
    return found


def messages(*turns: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(messages=list(turns))["messages"]
    return found


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def test_the_system_prompt_comes_first_without_what_is_not_for_the_model():
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = text("x-anthropic-billing-header: cc_version=2.1.197.123;")
    asked = [{"role": "system", "content": "You are\n\nbrief."}, ASKED]
    assert chat(system=[billing, text("You are"), text("brief.", **cached)])["messages"] == asked
    assert chat(system="You are\n\nbrief.")["messages"] == asked
    assert chat(system=[billing])["messages"] == [ASKED]


def test_blocks_of_the_assistant_are_one_message():
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        text("I will."),
        text("Now."),
        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": "é"}},
    ]
    function = {"name": "f", "arguments": {"x": "é"}}
    assert messages(ASKED, {"role": "assistant", "content": blocks})[1] == {
        "role": "assistant",
        "content": "I will.\nNow.",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("content", ["done", [text("do", citations=None), text("ne")], None])
def test_results_of_calls_are_messages_before_the_users(content: Any):
    result = {"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": False}
    told = "" if content is None else "done" if isinstance(content, str) else "do\nne"
    tool = {"role": "tool", "tool_call_id": "1", "content": told}
    assert messages({"role": "user", "content": [result]}) == [tool]
    turn = {"role": "user", "content": [result, text("Go on."), result]}
    assert messages(turn) == [tool, tool, {"role": "user", "content": "Go on."}]


def test_the_model_is_told_which_tools_a_search_of_the_clients_has_found():
    """As Claude Code searches tools; `tools` of its next request describes them."""
    found = [{"type": "tool_reference", "tool_name": name} for name in ("shop_buy", "shop_sell")]
    result = {"type": "tool_result", "tool_use_id": "1", "content": found}
    assert messages({"role": "user", "content": [result]}) == [
        {"role": "tool", "tool_call_id": "1", "content": "shop_buy\nshop_sell"}
    ]


@pytest.mark.parametrize("kind", ["image", "document", "of_tomorrow"])
def test_the_model_is_told_what_is_left_out_of_a_result(kind: str):
    content = [text("Look:"), {"type": kind, "source": {"type": "base64", "data": "x"}}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": content}
    told = f"Look:\n[{kind} left out: this model reads only text]"
    assert messages({"role": "user", "content": [result]}) == [
        {"role": "tool", "tool_call_id": "1", "content": told}
    ]


@pytest.mark.parametrize(
    ("content", "continues"),
    [
        ("It is", True),
        ([text("It is")], True),
        ([{"type": "tool_use", "id": "1", "name": "f", "input": {}}], None),
        ([], None),
    ],
)
def test_an_answer_that_the_client_begins_is_continued(content: Any, continues: bool | None):
    turns = [ASKED, {"role": "assistant", "content": content}]
    assert chat(messages=turns).get("continue_final_message") is continues
    assert "continue_final_message" not in chat(messages=[*turns, ASKED])


def test_instructions_may_come_later():
    assert messages(ASKED, {"role": "system", "content": "Now be brief."}) == [
        ASKED,
        {"role": "system", "content": "Now be brief."},
    ]


def test_tools_of_the_client_are_functions_and_others_are_left_out():
    tools = [
        {**TOOL, "cache_control": {"type": "ephemeral"}, "type": "custom", "strict": True},
        {"type": "bash_20250124", "name": "bash"},
    ]
    found = chat(tools=tools)
    assert found["tools"] == [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    assert "tools" not in chat(tools=tools[1:], tool_choice={"type": "auto"})


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], wanted: Any):
    assert chat(tools=[TOOL], tool_choice=choice)["tool_choice"] == wanted
    one = {**choice, "disable_parallel_tool_use": True}
    assert chat(tools=[TOOL], tool_choice=one)["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("fields", "effort", "thinks"),
    [
        ({}, None, None),
        ({"thinking": {"type": "disabled"}}, None, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high", True),
    ],
)
def test_how_much_to_think(fields: dict[str, Any], effort: str | None, thinks: bool | None):
    asked = validated(ChatBody, chat(**fields))
    assert (asked.reasoning_effort, asked.thinks) == (effort, thinks)


def test_a_form_in_its_former_place():
    form = {"type": "json_schema", "schema": SCHEMA}
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert chat(output_format=form)["response_format"] == wanted
    newer = {"format": {**form, "schema": {"type": "string"}}}
    both = chat(output_format=form, output_config=newer)["response_format"]
    assert both["json_schema"]["schema"] == {"type": "string"}


@pytest.mark.parametrize(("name", "value"), OF_VLLM)
def test_vllms_fields_have_their_effect_here_too(name: str, value: Any):
    assert validated(ChatBody, chat(**{name: value})).model_dump(include={name}, exclude_none=True)


def test_several_answers_are_refused():
    with pytest.raises(ValidationError, match="Input should be 1"):
        chat(n=2)
    assert "n" not in chat()
    assert chat(n=1)


def test_passages_that_a_client_has_found_are_read():
    passage = {"type": "search_result", "title": "Rivers", "source": "https://x.y/r"}
    passage["content"] = [{"type": "text", "text": "The Loire is long."}]
    asked = {"role": "user", "content": [passage, {"type": "text", "text": "Which is long?"}]}
    [message] = chat(messages=[asked])["messages"]
    assert message["content"] == "Rivers\nhttps://x.y/r\nThe Loire is long.\nWhich is long?"


def test_forms_limits_and_sampling_have_their_names_in_chat_completions():
    found = chat(
        max_tokens=5,
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        metadata={"user_id": "x"},
        context_management={"edits": []},
        a_field_of_tomorrow=1,
    )
    assert found == {
        "messages": [ASKED],
        "max_tokens": 5,
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    }
