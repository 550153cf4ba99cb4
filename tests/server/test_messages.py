"""Messages as clients send them and send them back."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from peagle.server.messages import MessageBody


def turn(**fields: Any) -> dict[str, Any]:
    return MessageBody.model_validate_json(json.dumps(fields)).turn


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([part("text", text="a"), part("input_text", text="b")], "ab"),
        ([part("output_text", text="a", annotations=[])], "a"),
        ([part("refusal", refusal="No.")], "No."),
        ([part("thinking", thinking="hm", signature="x"), part("text", text="a")], "a"),
        ([part("thinking", thinking=[part("text", text="hm")])], ""),
        ([part("reasoning", text="hm"), part("text", text="a", cache_control={"type": "x"})], "a"),
    ],
)
def test_the_text_of_every_form_of_content(content: Any, text: str):
    assert turn(role="assistant", content=content) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "foreign",
    [
        {"provider_specific_fields": {"refusal": None}},
        {"thinking_blocks": [{"type": "thinking"}]},
        {"reasoning_details": [{"type": "reasoning.text"}]},
        {"id": "msg_1", "type": "message", "status": "completed"},
        {"prefix": False, "annotations": [], "audio": None, "function_call": None},
        {"is_error": False, "refusal": None},
        {"reasoning": {"effort": "low"}},
    ],
)
def test_what_clients_add_to_a_message_reaches_no_template(foreign: dict[str, Any]):
    assert turn(role="assistant", content="a", **foreign) == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_thoughts_come_back_under_every_name(name: str):
    assert turn(role="assistant", content="a", **{name: "hm"})["reasoning_content"] == "hm"


def test_a_refusal_is_what_was_said():
    assert turn(role="assistant", content=None, refusal="No.")["content"] == "No."


@pytest.mark.parametrize(
    ("call", "read"),
    [
        (
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        ),
        (
            {"function": {"name": "f", "arguments": {"x": None}}, "extra_content": {"a": 1}},
            {"type": "function", "function": {"name": "f", "arguments": {"x": None}}},
        ),
        (
            {"index": 0, "function": {"name": "f", "parsed_arguments": {}}},
            {"type": "function", "function": {"name": "f"}},
        ),
    ],
)
def test_calls_of_every_form(call: dict[str, Any], read: dict[str, Any]):
    assert turn(role="assistant", tool_calls=[call])["tool_calls"] == [read]


def test_the_former_form_of_calls_and_results():
    given = {"name": "f", "arguments": "{}"}
    [call] = turn(role="assistant", content=None, function_call=given)["tool_calls"]
    assert call == {"type": "function", "function": given}
    assert turn(role="function", name="f", content="1") == {
        "role": "tool",
        "name": "f",
        "content": "1",
    }


def test_no_calls_are_no_key():
    assert "tool_calls" not in turn(role="assistant", content="a", tool_calls=[])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([part("image_url", image_url={"url": "x"})], "'image_url' is not supported; this model"),
        ([part("input_audio", input_audio={})], "'input_audio' is not supported; this model"),
        ([part("file")], "'file' is not supported"),
        ([part("text")], "Field required"),
        ([part("refusal", text="a")], "Field required"),
    ],
)
def test_what_is_no_text_is_refused(content: Any, words: str):
    with pytest.raises(ValidationError, match=words):
        turn(role="user", content=content)


def test_what_is_no_text_is_told_within_the_result_of_a_tool():
    content = [part("text", text="Look: "), part("image_url", image_url={"url": "x"})]
    told = "Look: [image_url left out: this model reads only text]"
    assert turn(role="tool", tool_call_id="1", content=content)["content"] == told
