"""OpenAI's Responses API: the same answers as chat completions, as items and their events."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from openai import AsyncOpenAI
from pydantic import BaseModel
from served import Served, named_events, serving

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": CITY}
PATCH = {"type": "custom", "name": "patch", "description": "Applies a patch."}
AGENTS = {"type": "namespace", "name": "agents", "tools": [{**WEATHER, "name": "close"}, PATCH]}
TOOLS = [WEATHER, PATCH, AGENTS, {"type": "web_search", "external_web_access": True}]
CALL = ("get_weather", {"city": "Paris"})
CASES = [
    ("It is 4.", []),
    ("I will look.", [CALL]),
    ("", [CALL]),
    ("", [("patch", {"input": '*** Begin\n+"é\t🙂"\\'})]),
    ("", [("agents__close", {"city": "x"})]),
    ("", [("agents__patch", {"input": ""})]),
    ("", [CALL, ("agents__patch", {"input": "+1\n"})]),
    ("", []),
]
OWN = {"id", "call_id", "created_at", "cached_tokens"}
"""Fields that differ from answer to answer."""


class Weather(BaseModel):
    city: str
    days: int


@pytest.fixture(scope="module", params=["qwen3", "gpt-oss", "plain"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as one:
        yield one


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("qwen3", tmp_path_factory.mktemp("qwen3"), api_keys=("sesame",)) as one:
        yield one


def whole(served: Served, text: str, **fields: Any) -> dict[str, Any]:
    answer = served.post("/v1/responses", {"input": "What is 2+2?", **fields}, text)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(served: Served, text: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"input": "What is 2+2?", "stream": True, **fields}
    return named_events(served.post("/v1/responses", body, text))


def written(served: Served, content: str, calls: list[Any]) -> tuple[str, str, str, list[Any]]:
    """A family's answer, and its thoughts, content and calls."""
    family = FAMILIES[served.name]
    calls = calls[:1] if served.name == "gpt-oss" else calls
    thoughts = "Let me think." if family.thinks else ""
    return family.write(thoughts, content, calls), thoughts, content, calls


def anonymous(value: Any) -> Any:
    """A value without what differs from answer to answer."""
    if isinstance(value, dict):
        return {key: anonymous(one) for key, one in value.items() if key not in OWN}
    return [*map(anonymous, value)] if isinstance(value, list) else value


def read(response: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """Thoughts, content and calls of a response, by the names that its client knows."""
    thoughts, content, calls = "", "", []
    for item in response["output"]:
        match item["type"]:
            case "reasoning":
                thoughts += "".join(part["text"] for part in item["content"])
            case "message":
                content += "".join(part["text"] for part in item["content"])
            case "function_call":
                name = (item.get("namespace"), item["name"])
                calls.append((name, json.loads(item["arguments"])))
            case "custom_tool_call":
                calls.append(((item.get("namespace"), item["name"]), {"input": item["input"]}))
    return thoughts, content, calls


def by_namespace(name: str) -> tuple[str | None, str]:
    before, _, after = name.rpartition("__")
    return before or None, after


@pytest.mark.parametrize(("content", "calls"), CASES)
def test_clients_read_what_the_target_writes_whole_and_streamed(
    served: Served, content: str, calls: list[Any]
):
    text, thoughts, content, calls = written(served, content, calls)
    response = whole(served, text, tools=TOOLS)
    named = [(by_namespace(name), given) for name, given in calls]
    assert read(response) == (thoughts, content, named)
    assert response["status"] == "completed"
    assert {item["status"] for item in response["output"]} <= {"completed"}
    last = streamed(served, text, tools=TOOLS)[-1]
    assert last["type"] == "response.completed"
    assert anonymous(last["response"]) == anonymous(response)


@pytest.mark.parametrize(("content", "calls"), CASES)
def test_a_stream_tells_each_item_from_its_beginning_to_its_end(
    served: Served, content: str, calls: list[Any]
):
    text, *_ = written(served, content, calls)
    how = {"tools": TOOLS, "reasoning": {"summary": "auto"}}
    first, second, *events, last = streamed(served, text, **how)
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["output"] == []
    numbers = [event["sequence_number"] for event in (first, second, *events, last)]
    assert numbers == [*range(len(numbers))]
    for index, item in enumerate(last["response"]["output"]):
        added, *own, done = [event for event in events if event["output_index"] == index]
        assert events[: len(own) + 2] == [added, *own, done]
        del events[: len(own) + 2]
        assert added["type"] == "response.output_item.added"
        assert added["item"]["status"] == "in_progress"
        for name in ("type", "id", "name", "namespace", "call_id"):
            assert added["item"].get(name) == item.get(name)
        assert (done["type"], done["item"]) == ("response.output_item.done", item)
        assert {event["item_id"] for event in own} == {item["id"]}
        check_texts(item, own)
    assert events == []


def check_texts(item: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """Fail unless an item's deltas add up to its texts, which their ends repeat."""
    texts = {
        "message": {"output_text": [part["text"] for part in item.get("content", ())]},
        "reasoning": {
            "reasoning_text": [part["text"] for part in item.get("content", ())],
            "reasoning_summary_text": [part["text"] for part in item.get("summary", ())],
        },
        "function_call": {"function_call_arguments": [item.get("arguments")]},
        "custom_tool_call": {"custom_tool_call_input": [item.get("input")]},
    }
    for kind, text in texts[item["type"]].items():
        head = f"response.{kind}"
        deltas = [event["delta"] for event in events if event["type"] == f"{head}.delta"]
        [done] = [event for event in events if event["type"] == f"{head}.done"]
        assert [done.get("text", done.get("arguments", done.get("input")))] == text
        assert "".join(deltas) == text[0]
        assert all(deltas)


def test_a_limit_cuts_the_same_items_whole_and_streamed(served: Served):
    for content, calls in (("It is 4.", []), ("", [CALL])):
        text, *_ = written(served, content, calls)
        tokens = whole(served, text, tools=TOOLS)["usage"]["output_tokens"]
        for most in (*range(1, tokens, 7), tokens):
            how = {"tools": TOOLS, "max_output_tokens": most}
            response = whole(served, text, **how)
            last = streamed(served, text, **how)[-1]
            assert last["type"] == f"response.{response['status']}"
            assert anonymous(last["response"]) == anonymous(response)
            cut = most < tokens
            assert response["status"] == ("incomplete" if cut else "completed")
            reason = {"reason": "max_output_tokens"} if cut else None
            assert response["incomplete_details"] == reason


def test_an_item_that_a_limit_cuts_says_so(served: Served):
    text, *_ = written(served, "It is 4.", [])
    tokens = whole(served, text)["usage"]["output_tokens"]
    [*before, last] = whole(served, text, max_output_tokens=tokens - 2)["output"]
    assert (last["type"], last["status"]) == ("message", "incomplete")
    assert {item["status"] for item in before} <= {"completed"}


def test_items_keep_the_order_in_which_they_were_said(tmp_path: Path):
    start = "<|end|><|start|>assistant<|channel|>"
    text = (
        f"<|channel|>analysis<|message|>One.{start}commentary<|message|>Wait."
        f"{start}analysis<|message|>Two.{start}commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}'
    )
    with serving("gpt-oss", tmp_path) as oss:
        response = whole(oss, text, tools=TOOLS)
        last = streamed(oss, text, tools=TOOLS)[-1]
    for output in (response["output"], last["response"]["output"]):
        *said, call = output
        assert [item["content"][0]["text"] for item in said] == ["One.", "Wait.", "Two."]
        assert [item["type"] for item in said] == ["reasoning", "message", "reasoning"]
        assert call["type"] == "function_call"


def test_tokens_are_counted_as_for_a_chat_completion(served: Served):
    text, thoughts, *_ = written(served, "It is 4.", [])
    counts = whole(served, text)["usage"]
    body = {"messages": [{"role": "user", "content": "What is 2+2?"}]}
    chat = served.post("/v1/chat/completions", body, text).json()["usage"]
    assert counts["input_tokens"] == chat["prompt_tokens"]
    assert counts["output_tokens"] == chat["completion_tokens"]
    assert counts["total_tokens"] == chat["total_tokens"]
    details = counts["output_tokens_details"]["reasoning_tokens"]
    assert details == chat["completion_tokens_details"]["reasoning_tokens"]
    assert (details > 0) == bool(thoughts)


def test_the_typed_client_reads_answers_streams_and_forms(served: Served):
    text, thoughts, *_ = written(served, '{"city": "Paris", "days": 2}', [])

    async def use(http: Any) -> tuple[Any, Any, list[str]]:
        client = AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http)
        parsed = await client.responses.parse(model="demo", input="?", text_format=Weather)
        async with client.responses.stream(model="demo", input="?", text_format=Weather) as stream:
            kinds = [event.type async for event in stream]
            return parsed, await stream.get_final_response(), kinds

    parsed, final, kinds = served.talk(use, text)
    assert parsed.output_parsed == final.output_parsed == Weather(city="Paris", days=2)
    assert final.output_text == parsed.output_text
    assert [item.type for item in final.output] == ["reasoning"] * bool(thoughts) + ["message"]
    assert kinds[-1] == "response.completed"


def test_what_a_client_sends_back_is_the_prompt_of_a_chat_completions_message(served: Served):
    text, *_ = written(served, "I will look.", [CALL])
    asked = {"role": "user", "content": "What is 2+2?"}
    items = whole(served, text, tools=[WEATHER], store=False)["output"]
    call = next(item["call_id"] for item in items if item["type"] == "function_call")
    output = {"type": "function_call_output", "call_id": call, "output": "Sun"}
    again = whole(served, "x", input=[asked, *items, output])
    function = {name: WEATHER[name] for name in ("name", "parameters")}
    body = {"messages": [asked], "tools": [{"type": "function", "function": function}]}
    chat = served.post("/v1/chat/completions", body, text).json()["choices"][0]["message"]
    found = {"role": "tool", "tool_call_id": chat["tool_calls"][0]["id"], "content": "Sun"}
    body = {"messages": [asked, chat, found]}
    wanted = served.post("/v1/chat/completions", body, "x").json()["usage"]
    assert again["usage"]["input_tokens"] == wanted["prompt_tokens"]


def test_thoughts_are_carried_only_for_clients_that_keep_answers(qwen: Served):
    text = FAMILIES["qwen3"].write("Hm.", "4.", [])

    def carried(**fields: Any) -> Any:
        body = {"input": "?", **fields}
        answer = qwen.post("/v1/responses", body, text, authorization="Bearer sesame")
        return answer.json()["output"][0]["encrypted_content"]

    assert carried() is None
    assert carried(store=False) == carried(include=["reasoning.encrypted_content"]) is not None


def test_an_answer_that_fails_is_an_error_whole_and_streamed(qwen: Served):
    """Its grammar turns out too complex."""
    schema = {"type": "string", "pattern": "^((a{100}){100}){100}$"}
    body = {"input": "?", "text": {"format": {"type": "json_schema", "schema": schema}}}
    begun = '"aaaaaaaa'  # so that it does not begin to think
    key = {"authorization": "Bearer sesame"}
    answer = qwen.post("/v1/responses", body, begun, **key)
    assert answer.status_code == 400
    why = answer.json()["error"]["message"]
    *_, last = named_events(qwen.post("/v1/responses", {**body, "stream": True}, begun, **key))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["message"] == why


def test_an_engine_that_fails_ends_a_stream_with_a_failed_response(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(type(served.script), "at", fail)
    *_, last = streamed(served, "")
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(last)
    assert served.post("/v1/responses", {"input": "x"}).status_code == 500


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: no answer is kept here"),
        ({"conversation": "conv_1"}, "conversation: no answer is kept here"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: no answer is kept here"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type: no answer is kept"),
        ({"background": True}, "background: nothing is kept here"),
        ({"top_logprobs": 2}, "top_logprobs: log-probabilities come with"),
        ({"include": ["message.output_text.logprobs"]}, "include: log-probabilities come with"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type: 'input_image' is not supported; this model reads only text",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id: Field required"),
        ({"input": []}, "input has nothing for the model to read"),
        ({"max_tokens": 5}, "max_tokens: no such field; did you mean max_output_tokens?"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [WEATHER]}, "called f"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [WEATHER, WEATHER]}, "two tools have the same name"),
        ({"model": "other"}, "does not exist here, but '"),
    ],
)
def test_refusals_say_what_to_do(qwen: Served, fields: dict[str, Any], words: str):
    answer = qwen.post("/v1/responses", {"input": "x", **fields}, authorization="Bearer sesame")
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]["message"]
