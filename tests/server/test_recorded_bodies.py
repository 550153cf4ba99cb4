"""What clients of the field really send is served, and OpenAI's own types read each answer.

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
from served import Served, serving

FILES = sorted((Path(__file__).parent / "bodies").glob("*.json"))
CLIENTS = {file.stem: json.loads(file.read_text())["requests"] for file in FILES}
REQUESTS = [
    pytest.param(request["body"], request["answer"], id=f"{client}-{i}")
    for client, requests in CLIENTS.items()
    for i, request in enumerate(requests)
]


@pytest.fixture(scope="module", params=["qwen3", "gpt-oss"])
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


def read(completion: ChatCompletion) -> tuple[str, str, list[Any], str]:
    """Thoughts, content, calls and why the answer ended."""
    [choice] = completion.choices
    message = choice.message
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
    ]
    thoughts = (message.model_extra or {}).get("reasoning_content", "")
    return thoughts, message.content or "", calls, choice.finish_reason


@pytest.mark.parametrize(("body", "answer"), REQUESTS)
def test_each_request_of_a_client_gets_the_answer_that_the_target_writes(
    served: Served, body: dict[str, Any], answer: dict[str, Any]
):
    calls = [(name, arguments) for name, arguments in answer["calls"]]
    calls = calls[:1] if served.name == "gpt-oss" else calls
    wanted = (answer["reasoning"], answer["content"], calls, "tool_calls" if calls else "stop")
    text = FAMILIES[served.name].write(answer["reasoning"], answer["content"], calls)
    once = {key: value for key, value in body.items() if not key.startswith("stream")}
    assert read(whole(served, once, text)) == wanted
    assert read(streamed(served, {**body, "stream": True}, text)) == wanted


@pytest.mark.parametrize("requests", CLIENTS.values(), ids=CLIENTS)
def test_each_client_was_recorded_with_a_call_and_with_its_result(requests: list[Any]):
    assert any(request["answer"]["calls"] for request in requests)
    assert any(
        message["role"] == "tool" for request in requests for message in request["body"]["messages"]
    )
