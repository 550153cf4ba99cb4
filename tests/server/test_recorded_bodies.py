"""What clients of the field really send is served; OpenAI's own types read each chat completion.

`bodies/` has the requests of each client's tool loops here, and what the target then wrote.
Their texts are cut to a few words; every key and form is as it was sent.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from families import FAMILIES
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion
from served import Served, named_events, serving

FILES = sorted((Path(__file__).parent / "bodies").glob("*.json"))
CLIENTS = {file.stem: json.loads(file.read_text()) for file in FILES}
CHAT = "/v1/chat/completions"
REQUESTS = [
    pytest.param(client.get("path", CHAT), request["body"], request["answer"], id=f"{name}-{i}")
    for name, client in CLIENTS.items()
    for i, request in enumerate(client["requests"])
]
Said = tuple[str, str, list[Any], str]
"""Thoughts, content, calls and why an answer ended."""


@pytest.fixture(scope="module", params=["qwen3", "qwen3-coder", "gpt-oss"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as one:
        yield one


def whole(served: Served, body: dict[str, Any], text: str) -> ChatCompletion:
    """The answer of one piece."""

    async def ask(http: httpx2.AsyncClient) -> ChatCompletion:
        client = AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        return await client.chat.completions.create(model="", messages=[], extra_body=body)

    return served.talk(ask, text)


def streamed(served: Served, body: dict[str, Any], text: str) -> ChatCompletion:
    """The answer that the official helper puts together from a stream."""

    async def ask(http: httpx2.AsyncClient) -> ChatCompletion:
        client = AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        stream = await client.chat.completions.create(
            model="", messages=[], stream=True, extra_body=body
        )
        state = ChatCompletionStreamState()
        async for chunk in stream:
            state.handle_chunk(chunk)
        return state.get_final_completion()

    return served.talk(ask, text)


def read(completion: ChatCompletion) -> Said:
    [choice] = completion.choices
    message = choice.message
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
    ]
    thoughts = (message.model_extra or {}).get("reasoning_content", "")
    return thoughts, message.content or "", calls, choice.finish_reason


def chat(served: Served, body: dict[str, Any], text: str) -> tuple[Said, Said]:
    """A chat completion, whole and streamed."""
    once = {key: value for key, value in body.items() if not key.startswith("stream")}
    return read(whole(served, once, text)), read(streamed(served, {**body, "stream": True}, text))


def response(served: Served, body: dict[str, Any], text: str) -> tuple[Said, Said]:
    """A response, whole and as its last event has it."""
    once = served.post("/v1/responses", {**body, "stream": False}, text).json()
    last = named_events(served.post("/v1/responses", {**body, "stream": True}, text))[-1]
    return read_items(once["output"]), read_items(last["response"]["output"])


def read_items(items: list[dict[str, Any]]) -> Said:
    texts = {"reasoning": "", "message": ""}
    calls = []
    for item in items:
        if item["type"] == "function_call":
            space = f"{item['namespace']}__" if "namespace" in item else ""
            calls.append((space + item["name"], json.loads(item["arguments"])))
        else:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    return texts["reasoning"], texts["message"], calls, "tool_calls" if calls else "stop"


def message(served: Served, body: dict[str, Any], text: str) -> tuple[Said, Said]:
    """A message, whole and put together from its events."""
    once = served.post("/v1/messages", {**body, "stream": False}, text).json()
    blocks: list[dict[str, Any]] = []
    for event in named_events(served.post("/v1/messages", {**body, "stream": True}, text)):
        match event:
            case {"content_block": block}:
                blocks.append({**block, "json": ""})
            case {"type": "content_block_delta", "delta": {"partial_json": part}}:
                blocks[-1]["json"] += part
            case {"type": "content_block_delta", "delta": {"type": kind, **delta}}:
                key = kind.removesuffix("_delta")
                blocks[-1][key] += delta[key]
            case {"type": "message_delta", "delta": {"stop_reason": reason}}:
                stop = reason
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return read_blocks(once["content"], once["stop_reason"]), read_blocks(blocks, stop)


def read_blocks(blocks: list[dict[str, Any]], stop: str) -> Said:
    thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    content = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    return thoughts, content, calls, {"tool_use": "tool_calls", "end_turn": "stop"}[stop]


ROUTES = {CHAT: chat, "/v1/responses": response, "/v1/messages": message}


@pytest.mark.sweep
@pytest.mark.parametrize(("path", "body", "answer"), REQUESTS)
def test_each_request_of_a_client_gets_the_answer_that_the_target_writes(
    served: Served, path: str, body: dict[str, Any], answer: dict[str, Any]
):
    family = FAMILIES[served.name]
    calls = [(name, arguments) for name, arguments in answer["calls"]]
    calls = calls[:1] if served.name == "gpt-oss" else calls
    thoughts = answer["reasoning"] if family.thinks else ""
    wanted = (thoughts, answer["content"], calls, "tool_calls" if calls else "stop")
    text = family.write(thoughts, answer["content"], calls)
    assert ROUTES[path](served, body, text) == (wanted, wanted)


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_each_client_was_recorded_with_a_call_and_with_its_result(client: dict[str, Any]):
    assert any(request["answer"]["calls"] for request in client["requests"])
    sent = json.dumps([request["body"] for request in client["requests"]])
    results = ('"role": "tool"', '"type": "function_call_output"', '"type": "tool_result"')
    assert any(result in sent for result in results)
