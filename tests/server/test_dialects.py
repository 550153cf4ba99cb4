"""Every family through HTTP: what its clients read of exact answers, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from families import FAMILIES, oddly_written, tokenizer
from served import Served, serving

from peagle.config import ChatConfig

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": EMPTY}},
]
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {**EMPTY, "properties": {"x": {"type": "integer"}}}},
}
CALL = ("get_weather", {"city": "Paris", "days": 2})
NOW = ("now", {})
AUTO = {"tools": TOOLS}
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
NAMED = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
BOTH = {"tools": TOOLS, "response_format": FORM}
CASES = [
    ({}, "It is 4.", []),
    (AUTO, "It is 4.", []),
    (AUTO, "I will look.", [CALL]),
    (AUTO, "", [CALL, NOW]),
    ({**AUTO, "tool_choice": "none"}, "It is 4.", []),
    (REQUIRED, "", [CALL]),
    (REQUIRED, "", [CALL, NOW]),
    (NAMED, "", [CALL]),
    ({"response_format": FORM}, '{"x": 3}', []),
    (BOTH, '{"x": 3}', []),
    (BOTH, "", [CALL]),
]


def ask(served: Served, text: str, **fields: Any) -> Any:
    """Ask for an answer, which the target then writes: parsed, or a stream's chunks."""
    body = {"messages": [{"role": "user", "content": "What is 2+2?"}], **fields}
    answer = served.post("/v1/chat/completions", body, text)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return answer.json()
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as one:
        yield one


def folded(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream as clients put it together: text by name, calls by index."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning_content", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    [choice] = answer["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "finish_reason": choice["finish_reason"],
    }


@pytest.mark.sweep
@pytest.mark.parametrize("k", [0, 1, 7])
@pytest.mark.parametrize(("fields", "content", "calls"), CASES)
def test_clients_read_what_the_target_writes(
    served: Served, fields: dict[str, Any], content: str, calls: list[Any], k: int
):
    family = FAMILIES[served.name]
    thoughts = "Let me think." if family.thinks else ""
    content = content if family.talks or not calls else ""
    calls = calls[:1] if served.name == "gpt-oss" else calls
    text = family.write(thoughts, content, calls)
    how = {**fields, "max_tokens": 300, "speculation": {"num_speculative_tokens": k}}
    answer = ask(served, text, **how)
    read = whole(answer)
    assert (read["reasoning"], read["content"]) == (thoughts, content)
    assert [(name, json.loads(given)) for name, given in read["calls"]] == calls
    assert read["finish_reason"] == ("tool_calls" if calls else "stop")
    assert folded(ask(served, text, **how, stream=True)) == read
    details = answer["usage"]["completion_tokens_details"]
    assert (details["reasoning_tokens"] > 0) == bool(thoughts)
    if k == 7 and served.name != "plain":
        assert details["accepted_prediction_tokens"] > 0


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fields", "content", "calls"),
    [(AUTO, "It is 4.", []), (AUTO, "", [CALL]), (REQUIRED, "", [CALL]), (BOTH, '{"x": 3}', [])],
)
def test_a_limit_cuts_thoughts_content_and_calls_alike_whole_and_streamed(
    served: Served, fields: dict[str, Any], content: str, calls: list[Any]
):
    family = FAMILIES[served.name]
    text = family.write("Hm." if family.thinks else "", content, calls)
    for k in (0, 7):
        for most in range(1, 60, 14):
            speculation = {"num_speculative_tokens": k}
            how = {**fields, "max_tokens": most, "speculation": speculation}
            read = whole(ask(served, text, **how))
            assert folded(ask(served, text, **how, stream=True)) == read
            assert read["finish_reason"] in ("length", "tool_calls", "stop")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "arguments", ['{"city": "cut of', "[1]", "plain", "", "null", None, [1], 5]
)
def test_a_session_goes_on_after_a_call_whose_arguments_are_no_object(
    served: Served, arguments: Any
):
    """The client repeats the call with each further request, in each API's own form."""
    function = {"name": "get_weather", "arguments": arguments}
    begin, on = {"role": "user", "content": "Look."}, {"role": "user", "content": "Go on."}
    chat = [
        begin,
        {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "Error"},
        on,
    ]
    items = [
        begin,
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": None},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": None},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "Error"},
        on,
    ]
    used = {"type": "tool_use", "id": "c", "name": "get_weather", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "Error"}
    blocks = [
        begin,
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    for path, body in (
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 5}),
        ("/v1/responses", {"input": items, "max_output_tokens": 5}),
        ("/v1/messages", {"messages": [*blocks, on], "max_tokens": 5}),
    ):
        answer = served.post(path, body, "Ok")
        assert answer.status_code == 200, answer.text


SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{{ '<think>\n' if SWITCH }}"
)
SWITCHES = {
    "enable_thinking": "enable_thinking",  # Qwen3, Gemma 4, and most others
    "not off": "enable_thinking is not defined or enable_thinking",
    "thinking": "thinking",  # DeepSeek, Granite
    "mode": "thinking_mode == 'enabled'",  # MiniMax
}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = (PROMPT + "<think>\n", PROMPT)
COUNT = "/v1/messages/count_tokens"
COUNTS = {"/tokenize": "count", COUNT: "input_tokens"}
ON = [
    {"thinking": {"type": "enabled", "budget_tokens": 2048}},
    {"thinking": {"type": "enabled", "budget_tokens": 2048}, "effort": "low"},
    {"thinking": {"type": "adaptive", "display": "omitted"}},
    {"thinking": True},
    {"enable_thinking": True},
    {"effort": "high"},
]
OFF = [
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "disabled"}, "effort": "high"},
    {"enable_thinking": False},
    {"effort": "none"},
]


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("qwen3", tmp_path_factory.mktemp("switched")) as one:
        yield one


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("usual", [{}, {"enable_thinking": False, "thinking": False}])
def test_thoughts_are_switched_in_every_api_and_template(
    switched: Served, switch: str, usual: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Whatever the server's own default is."""
    template = SWITCHED.replace("SWITCH", switch)
    config = ChatConfig(chat_template=template, default_chat_template_kwargs=usual)
    monkeypatch.setattr(switched.app.state.service.llm, "chat_config", config)
    asked = [{"role": "user", "content": "hi"}]

    def tokens(path: str, key: str, fields: dict[str, Any], effort: dict[str, Any]) -> int:
        answer = switched.post(path, {key: asked, **fields, **effort}, "Ok")
        assert answer.status_code == 200, answer.text
        found = answer.json()
        counted: int = found["usage"]["input_tokens"] if "usage" in found else found[COUNTS[path]]
        return counted

    for fields, thinks in [(one, True) for one in ON] + [(one, False) for one in OFF]:
        rest = {key: value for key, value in fields.items() if key != "effort"}
        effort = fields.get("effort")
        spent = {
            tokens("/tokenize", "messages", rest, {"reasoning_effort": effort}),
            tokens("/v1/responses", "input", rest, {"reasoning": {"effort": effort}}),
            tokens(COUNT, "messages", rest, {"output_config": {"effort": effort}}),
        }
        on, off = (len(tokenizer("qwen3")(text).input_ids) for text in PROMPTS)
        assert spent == {on if thinks else off}, fields


def test_log_probabilities_are_those_of_the_content(served: Served):
    family = FAMILIES[served.name]
    text = family.write("Hm." if family.thinks else "", "It is 4.", [])
    for answer in (
        ask(served, text, logprobs=True)["choices"],
        [chunk["choices"][0] for chunk in ask(served, text, logprobs=True, stream=True)],
    ):
        scores = [one["logprobs"]["content"] for one in answer if one["logprobs"]]
        tokens = [one["token"] for content in scores for one in content]
        assert "".join(tokens[:-1]) == "It is 4."


def test_several_choices_are_read_apart(served: Served):
    text = FAMILIES[served.name].write("", "", [CALL])
    if FAMILIES[served.name].begun:
        text = "Hm.</think>" + text
    answer = ask(served, text, **AUTO, n=2)
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len({*ids}) == 2


def test_no_event_of_a_stream_is_empty(served: Served):
    text = FAMILIES[served.name].write("", "", [("get_weather", {"city": "Paris " * 9})])
    *chunks, _ = ask(served, text, **AUTO, stream=True)
    assert all(chunk["choices"][0]["delta"] for chunk in chunks)


def test_thoughts_can_be_left_out_or_left_in(served: Served):
    family = FAMILIES[served.name]
    thoughts = "Hm." if family.thinks else ""
    text = family.write(thoughts, "It is 4.", [])
    for field, content in (("include_reasoning", ""), ("separate_reasoning", thoughts)):
        read = whole(ask(served, text, **{field: False}))
        assert (read["reasoning"], read["content"]) == ("", content + "It is 4.")
        assert folded(ask(served, text, **{field: False}, stream=True)) == read


ASKED = [{"role": "user", "content": "What is 2+2?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED, "tools": TOOLS},
    "/v1/messages": {
        "messages": ASKED,
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "max_tokens": 200,
    },
    "/v1/responses": {
        "input": "What is 2+2?",
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
    },
}
"""What the three APIs ask for a call."""


def calls_of(path: str, answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls of an answer, their arguments as values."""
    if path == "/v1/messages":
        return [(b["name"], b["input"]) for b in answer["content"] if b["type"] == "tool_use"]
    if path == "/v1/responses":
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
    else:
        calls = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.sweep
@pytest.mark.parametrize("path", BODIES)
def test_calls_that_are_oddly_written_reach_clients_as_any_other(served: Served, path: str):
    call = ("get_weather", {"city": "a\n\tb", "days": 2})
    answer = served.post(path, BODIES[path], oddly_written(served.name, [call])).json()
    assert calls_of(path, answer) == [call]


@pytest.mark.sweep
@pytest.mark.parametrize("path", BODIES)
def test_a_call_that_the_model_breaks_off_is_an_error(served: Served, path: str):
    """Whole and streamed: arguments that are cut must not be run."""
    family = FAMILIES[served.name]
    call = family.write("", "", [("get_weather", {"city": "Paris and Rome"})])
    text = ("Hm.</think>" if family.begun else "") + call[: call.index(" Rome")]
    whole = served.post(path, BODIES[path], text)
    stream = served.post(path, {**BODIES[path], "stream": True}, text)
    if served.name == "llama3.2":  # a list that does not end is no call
        assert whole.status_code == 200
    else:
        assert (whole.status_code, "within the arguments" in whole.text) == (500, True)
        assert "within the arguments" in stream.text.strip().splitlines()[-1]
