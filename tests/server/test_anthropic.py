"""Anthropic's Messages API: the same answers as chat completions, as blocks and their events."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from families import FAMILIES
from served import Served, named_events, serving

from peagle.server.settings import Limits

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
TOOLS = [WEATHER, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
CALL = ("get_weather", {"city": "Paris", "days": [1, 2.5, None]})
CASES = [("It is 4.", []), ("I will look.", [CALL]), ("", [CALL]), ("", [CALL, CALL]), ("", [])]
ASKED = [{"role": "user", "content": "What is 2+2?"}]
KEY = {"x-api-key": "sesame"}


@pytest.fixture(scope="module", params=["qwen3", "gpt-oss", "plain"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as one:
        yield one


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a key, and little room for bodies."""
    limits = Limits(body_bytes=2000)
    directory = tmp_path_factory.mktemp("locked")
    with serving("qwen3", directory, api_keys=("sesame",), limits=limits) as one:
        yield one


def whole(served: Served, text: str, **fields: Any) -> dict[str, Any]:
    answer = served.post("/v1/messages", {"messages": ASKED, "max_tokens": 200, **fields}, text)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(served: Served, text: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": ASKED, "max_tokens": 200, "stream": True, **fields}
    return named_events(served.post("/v1/messages", body, text))


def written(served: Served, content: str, calls: list[Any]) -> tuple[str, str, list[Any]]:
    """A family's answer, its thoughts and its calls."""
    family = FAMILIES[served.name]
    calls = calls[:1] if served.name == "gpt-oss" else calls
    thoughts = "Let me think." if family.thinks else ""
    return family.write(thoughts, content, calls), thoughts, calls


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream as its clients put it together."""
    first, second, *events, end, last = events
    assert (first["type"], second["type"]) == ("message_start", "ping")
    assert (end["type"], last["type"]) == ("message_delta", "message_stop")
    content: list[dict[str, Any]] = []
    closed = 0
    for event in events:
        if event["type"] == "content_block_start":
            assert closed == len(content) == event["index"]
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert closed == event["index"] == len(content) - 1
            add(content[-1], event["delta"])
        else:
            assert (event["type"], event["index"]) == ("content_block_stop", closed)
            closed += 1
    for block in content:
        if "partial" in block:
            block["input"] = json.loads(block.pop("partial"))
    usage = {**first["message"]["usage"], **end["usage"]}
    return {**first["message"], **end["delta"], "usage": usage, "content": content}


def add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to its block."""
    match delta:
        case {"type": "text_delta", "text": text}:
            block["text"] += text
        case {"type": "thinking_delta", "thinking": text}:
            block["thinking"] += text
        case {"type": "signature_delta", "signature": text}:
            block["signature"] += text
        case {"type": "input_json_delta", "partial_json": text}:
            block["partial"] = block.get("partial", "") + text
        case _:
            raise AssertionError(delta)


def anonymous(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs from answer to answer."""
    content = [
        {key: value for key, value in block.items() if key not in ("id", "signature")}
        for block in message["content"]
    ]
    usage = {**message["usage"], "input_tokens": 0, "cache_read_input_tokens": 0}
    return {**message, "id": "", "content": content, "usage": usage}


@pytest.mark.parametrize(("content", "calls"), CASES)
def test_clients_read_what_the_target_writes_whole_and_streamed(
    served: Served, content: str, calls: list[Any]
):
    text, thoughts, calls = written(served, content, calls)
    message = whole(served, text, tools=TOOLS)
    by_type = {
        "thinking": [b["thinking"] for b in message["content"] if b["type"] == "thinking"],
        "text": [b["text"] for b in message["content"] if b["type"] == "text"],
        "tool_use": [
            (b["name"], b["input"]) for b in message["content"] if b["type"] == "tool_use"
        ],
    }
    assert by_type["thinking"] == [thoughts] * bool(thoughts)
    assert by_type["text"] == [content] * bool(content)
    assert by_type["tool_use"] == calls
    assert all(b["signature"] for b in message["content"] if b["type"] == "thinking")
    assert message["stop_reason"] == ("tool_use" if calls else "end_turn")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "demo")
    assert anonymous(folded(streamed(served, text, tools=TOOLS))) == anonymous(message)


def test_a_stream_begins_with_the_number_of_tokens_of_its_prompt(served: Served):
    first, *_, end, _ = streamed(served, "x")
    count = served.post("/v1/messages/count_tokens", {"messages": ASKED}).json()
    start, final = first["message"]["usage"], end["usage"]
    assert start["input_tokens"] == count["input_tokens"] > 0
    assert final["input_tokens"] + final["cache_read_input_tokens"] == start["input_tokens"]


def test_tokens_are_counted_as_for_a_chat_completion(served: Served):
    text, thoughts, _ = written(served, "It is 4.", [])
    counts = whole(served, text)["usage"]
    chat = served.post("/v1/chat/completions", {"messages": ASKED}, text).json()["usage"]
    cached = counts["cache_read_input_tokens"]
    assert counts["input_tokens"] + cached == chat["prompt_tokens"]
    assert counts["output_tokens"] == chat["completion_tokens"]
    assert (counts["output_tokens_details"]["thinking_tokens"] > 0) == bool(thoughts)


def test_what_a_client_sends_back_is_the_prompt_of_a_chat_completions_message(served: Served):
    text, *_ = written(served, "I will look.", [CALL])
    blocks = whole(served, text, tools=TOOLS)["content"]
    call = next(block["id"] for block in blocks if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call, "content": "Sun"}
    said = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    body = {"messages": [*ASKED, *said]}
    count = served.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    function = {"name": "get_weather", "parameters": SCHEMA}
    body = {"messages": ASKED, "tools": [{"type": "function", "function": function}]}
    chat = served.post("/v1/chat/completions", body, text).json()["choices"][0]["message"]
    found = {"role": "tool", "tool_call_id": chat["tool_calls"][0]["id"], "content": "Sun"}
    wanted = served.post("/v1/chat/completions", {"messages": [*ASKED, chat, found]}, "x").json()
    assert count == wanted["usage"]["prompt_tokens"]


def test_a_limit_cuts_the_same_blocks_whole_and_streamed(served: Served):
    text, *_ = written(served, "It is 4.", [])
    tokens = whole(served, text, tools=TOOLS)["usage"]["output_tokens"]
    for most in (*range(1, tokens, 3), tokens):
        message = whole(served, text, tools=TOOLS, max_tokens=most)
        cut = most < tokens
        assert message["stop_reason"] == ("max_tokens" if cut else "end_turn")
        events = streamed(served, text, tools=TOOLS, max_tokens=most)
        assert anonymous(folded(events)) == anonymous(message)


def test_a_call_that_a_limit_cuts_has_the_arguments_that_can_be_read(served: Served):
    text, *_ = written(served, "", [CALL])
    tokens = whole(served, text, tools=TOOLS)["usage"]["output_tokens"]
    message = whole(served, text, tools=TOOLS, max_tokens=tokens - 12)
    assert message["stop_reason"] == "max_tokens"
    [call] = [block for block in message["content"] if block["type"] == "tool_use"]
    assert call["input"]["city"] == "Paris"


def test_a_stop_sequence_is_named(served: Served):
    text, *_ = written(served, "It is 4. And more.", [])
    how = {"stop_sequences": ["never", "4."]}
    message = whole(served, text, **how)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "4.")
    assert message["content"][-1]["text"] == "It is "
    assert anonymous(folded(streamed(served, text, **how))) == anonymous(message)


def test_an_engine_that_fails_ends_a_stream_with_an_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(type(served.script), "at", fail)
    *_, last = streamed(served, "")
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in json.dumps(last)
    answer = served.post("/v1/messages", {"messages": ASKED})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "api_error")


def test_either_header_opens_the_api(locked: Served):
    body = {"messages": ASKED}
    for headers, status in (
        (KEY, 200),
        ({"authorization": "Bearer sesame"}, 200),
        ({"x-api-key": "wrong", "authorization": "Bearer sesame"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": "sesame"}, 401),
        ({}, 401),
    ):
        answer = locked.post("/v1/messages/count_tokens", body, **headers)
        assert answer.status_code == status, headers
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert locked.post("/v1/chat/completions", body, "x", **KEY).status_code == 200


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"messages": []}, "invalid_request_error", "messages: "),
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens: "),
        ({"model": "claude"}, "not_found_error", "the model 'claude' does not exist here"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "invalid_request_error",
            "messages.0.content.0.type: image is not supported; this model reads only text",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}},
            "invalid_request_error",
            "no tool is called f",
        ),
        ({"tool_choice": {"type": "any"}}, "invalid_request_error", "tool_choice needs tools"),
        ({"tools": [WEATHER, WEATHER]}, "invalid_request_error", "two tools have the same name"),
        ({"system": "x" * 2000}, "request_too_large", "larger than 2000 bytes"),
    ],
)
def test_refusals_have_anthropics_form(locked: Served, fields: Any, kind: str, words: str):
    body = {"messages": ASKED, "max_tokens": 5, **fields}
    error = locked.post("/v1/messages", body, **KEY).json()
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert words in error["error"]["message"]


def test_a_prompt_that_is_too_long_is_told_in_words_by_which_clients_shorten_it(served: Served):
    long = [{"role": "user", "content": "é" * 300}]
    answer = served.post("/v1/messages", {"messages": long, "stream": True})
    assert answer.status_code == 400
    told = re.match(r"prompt is too long: (\d+) tokens > (\d+)", answer.json()["error"]["message"])
    assert told is not None
    count = served.post("/v1/messages/count_tokens", {"messages": long}).json()["input_tokens"]
    assert int(told[1]) == count > int(told[2])


def test_other_routes_keep_openais_form(locked: Served):
    assert "type" not in locked.post("/v1/chat/completions", {}, **KEY).json()
