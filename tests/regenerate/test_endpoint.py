import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import uvicorn
from chat_templates import assistant, user
from openai_stub import Reply, Stub, openai_stub, said

from peagle import LLM, AsyncLLM, EngineConfig
from peagle.config import SamplingParams
from peagle.errors import InputError
from peagle.pair import bundled
from peagle.regenerate import endpoint as module
from peagle.regenerate.answers import NoAnswerError, Regeneration
from peagle.regenerate.endpoint import Endpoint, open_endpoint, seconds_to_wait
from peagle.regenerate.engine import EngineAnswerer
from peagle.server.app import create_app
from peagle.server.settings import ServerSettings
from peagle.train.samples import Chat

PARAMS = SamplingParams(max_tokens=9, seed=4)
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.fixture
def stub() -> Iterator[Stub]:
    with openai_stub() as running:
        yield running


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the waits without waiting."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(module, "asyncio", type("Clock", (), {"sleep": staticmethod(sleep)}))
    return waited


def ask(url: str, params: SamplingParams = PARAMS, **more: Any) -> Regeneration:
    async def run() -> Regeneration:
        async with open_endpoint(url, "m", 4) as endpoint:
            return await endpoint.chat(Chat("a:1", (user("a"),), **more), params)

    return asyncio.run(run())


def complete(url: str) -> Regeneration:
    async def run() -> Regeneration:
        async with open_endpoint(url, "m", 4) as endpoint:
            return await endpoint.complete("x", PARAMS)

    return asyncio.run(run())


def test_variables_of_the_template_go_along(stub: Stub):
    ask(stub.url, variables={"enable_thinking": False})
    assert stub.requests[0][2]["chat_template_kwargs"] == {"enable_thinking": False}
    ask(stub.url)
    assert "chat_template_kwargs" not in stub.requests[1][2]


def test_what_is_asked_and_answered(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert ask(stub.url + "/", tools=TOOLS) == Regeneration(assistant("fine"), 4)
    path, headers, body = stub.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer secret"
    assert body == {
        "model": "m",
        "messages": [user("a")],
        "tools": TOOLS,
        "max_tokens": 9,
        "temperature": 0.0,
        "return_token_ids": True,
    }
    monkeypatch.delenv("OPENAI_API_KEY")
    assert complete(stub.url) == Regeneration(assistant("fine"), 4)
    path, headers, body = stub.requests[1]
    assert path == "/v1/completions"
    assert "authorization" not in headers
    asked = {"model": "m", "prompt": "x", "max_tokens": 9, "temperature": 0.0}
    assert body == asked | {"return_token_ids": True}
    ask(stub.url, params=SamplingParams(temperature=0.5, seed=4))
    assert stub.requests[2][2]["seed"] == 4


def test_reasoning_and_calls_are_part_of_the_answer(stub: Stub):
    stub.reply = lambda body: said("", reasoning_content="hm", tool_calls=[{"id": "1"}], role="x")
    message = assistant("", reasoning_content="hm", tool_calls=[{"id": "1"}])
    assert ask(stub.url) == Regeneration(message, 0)
    stub.reply = lambda body: said("4", reasoning="hm", reasoning_content=None, tool_calls=[])
    assert ask(stub.url) == Regeneration(assistant("4", reasoning_content="hm"), 1)
    choice = {"message": {"content": None}, "finish_reason": "stop"}
    stub.reply = lambda body: (200, {}, {"choices": [choice]})
    assert ask(stub.url) == Regeneration(assistant(""), 0)


def test_the_ids_that_a_server_gives_are_kept(stub: Stub):
    """vLLM names a chat's prompt beside its choices, a completion's within its choice."""
    status, headers, answer = said("fine")
    answer["choices"][0]["token_ids"] = [4, 5]
    stub.reply = lambda body: (status, headers, {**answer, "prompt_token_ids": [1, 2, 3]})
    assert ask(stub.url) == Regeneration(assistant("fine"), 4, False, (4, 5), (1, 2, 3))
    choice = {**answer["choices"][0], "prompt_token_ids": [1]}
    stub.reply = lambda body: (status, headers, {**answer, "choices": [choice]})
    assert complete(stub.url) == Regeneration(assistant("fine"), 4, False, (4, 5), (1,))
    stub.reply = lambda body: (status, headers, {**answer, "prompt_token_ids": None})
    assert ask(stub.url) == Regeneration(assistant("fine"), 4)


def test_a_server_that_knows_no_ids_is_asked_without(stub: Stub):
    refusal = 400, {}, {"error": {"message": "Unrecognized argument: return_token_ids"}}
    stub.reply = lambda body: refusal if "return_token_ids" in body else said("fine")
    assert ask(stub.url) == Regeneration(assistant("fine"), 4)

    async def several() -> list[Regeneration]:
        async with open_endpoint(stub.url, "m", 4) as endpoint:
            asked = (endpoint.chat(Chat("a:1", (user("a"),)), PARAMS) for _ in range(8))
            return await asyncio.gather(*asked)

    assert asyncio.run(several()) == [Regeneration(assistant("fine"), 4)] * 8


@pytest.mark.parametrize("reason", ["length", "stop", "tool_calls", "function_call"])
def test_an_answer_that_a_limit_ended_is_a_cut_one(stub: Stub, reason: str):
    choice = {"message": assistant("f"), "text": "f", "finish_reason": reason}
    stub.reply = lambda body: (200, {}, {"choices": [choice]})
    assert ask(stub.url).cut == complete(stub.url).cut == (reason == "length")


@pytest.mark.parametrize(
    "ending",
    [
        *({"finish_reason": reason} for reason in ("content_filter", "abort", "repetition", None)),
        {"finish_reason": {"type": "abort"}},
        {},
    ],
)
def test_what_something_else_ended_is_no_answer(stub: Stub, ending: dict[str, Any]):
    """A filter, a client that left, a server that stopped: the text is not all of the target's."""
    choice = {"message": assistant("half an ans"), "text": "half an ans", **ending}
    stub.reply = lambda body: (200, {}, {"choices": [choice]})
    for answered in (ask, complete):
        with pytest.raises(NoAnswerError, match=r"was ended by neither the target nor a"):
            answered(stub.url)


def test_a_refusal_beside_the_content_is_no_answer(stub: Stub):
    stub.reply = lambda body: said("", refusal="No.")
    with pytest.raises(NoAnswerError, match=r"^the server answers with a refusal: No\.$"):
        ask(stub.url)


def replies(stub: Stub, *sequence: Reply) -> None:
    """Give these responses, then repeat the last one."""
    waiting = itertools.chain(sequence, itertools.repeat(sequence[-1]))
    stub.reply = lambda body: next(waiting)


def test_a_busy_server_is_asked_again_when_it_says(stub: Stub, pauses: list[float]):
    busy = {"error": {"message": "busy"}}
    replies(stub, (429, {"Retry-After": "7"}, busy), (503, {}, busy), (500, {}, b"?"), said("ok"))
    assert ask(stub.url).message["content"] == "ok"
    assert pauses == [7.0, *module.PAUSES[1:3]]


def test_a_request_at_which_a_server_fails_again_and_again_has_no_answer(
    stub: Stub, pauses: list[float]
):
    """Others go on: an answer that ends with an error is a failure too."""
    replies(stub, (500, {}, {"error": {"message": "too complex"}}))
    with pytest.raises(NoAnswerError, match=r"^an answer ended with an error: too complex$"):
        ask(stub.url)
    assert pauses == list(module.PAUSES[: module.FAILURES - 1])


def test_a_server_that_stays_away(stub: Stub, pauses: list[float]):
    replies(stub, (503, {}, {"error": {"message": "draining"}}))
    with pytest.raises(InputError, match=r"does not answer: 503 draining; the same command conti"):
        ask(stub.url)
    assert pauses == list(module.PAUSES)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(InputError, match=rf"^{url} cannot be reached: "):
        ask(url)
    assert pauses == list(module.PAUSES), "one that never answered is not waited for"


FAILED = {"text": "", "finish_reason": "error", "error": {"message": "too complex"}}
REFUSALS: list[tuple[Reply, type[Exception], str]] = [
    ((400, {}, {"error": {"message": "maximum context length is 5"}}), NoAnswerError, "is 5"),
    ((400, {}, {"message": "This model's Context is full"}), NoAnswerError, "Context is full"),
    ((200, {}, {"choices": [FAILED]}), NoAnswerError, "ended with an error: too complex"),
    ((200, {}, {"choices": [{"finish_reason": "error"}]}), NoAnswerError, "ended with an error$"),
    ((400, {}, {"error": {"message": "bad role"}}), NoAnswerError, "/v1 refuses: 400 bad role"),
    ((413, {}, b"too large"), NoAnswerError, "/v1 refuses: 413 too large"),
    ((422, {}, {"detail": "roles"}), NoAnswerError, '/v1 refuses: 422 {"detail": "roles"}'),
    ((403, {}, {"error": {"message": "not you"}}), InputError, "/v1 refuses: 403 not you"),
    ((401, {}, {"error": {"message": "no key"}}), InputError, "/v1 refuses: 401 no key"),
    ((404, {}, b"<html>context not found</html>"), InputError, "/v1 refuses: 404 <html>context"),
    ((301, {"Location": "/"}, b""), InputError, "/v1 refuses: 301"),
    ((200, {}, b"<html>"), InputError, "does not answer like OpenAI's API"),
    ((200, {}, {"choices": []}), InputError, "does not answer like OpenAI's API"),
    ((200, {}, {"choices": [{"message": "?"}]}), InputError, "does not answer like OpenAI's"),
]


@pytest.mark.parametrize(("reply", "error", "message"), REFUSALS)
def test_refusals(
    stub: Stub, pauses: list[float], reply: Reply, error: type[Exception], message: str
):
    replies(stub, reply)
    for call in (ask, complete):
        with pytest.raises(error, match=message):
            call(stub.url)
    assert not pauses


def test_where_the_api_is_missing_its_url_is_asked_for(stub: Stub):
    replies(stub, (404, {}, {"error": {"message": "nothing is here"}}))
    with pytest.raises(InputError, match="404 nothing is here; give its /v1 URL"):
        ask(stub.url.removesuffix("/v1"))


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:abc/v1"])
def test_what_is_no_url(url: str):
    with pytest.raises(InputError, match=f"endpoint {url} is not a URL; give one such as"):
        ask(url)


def test_how_long_a_server_asks_to_wait():
    assert seconds_to_wait({}) is None
    assert seconds_to_wait({"Retry-After": "soon"}) is None
    assert seconds_to_wait({"Retry-After": "1.5"}) == 1.5
    assert seconds_to_wait({"Retry-After": "-3"}) == 0.0
    assert seconds_to_wait({"Retry-After": "nan"}) == 0.0
    for long in ("3600", "inf"):
        assert seconds_to_wait({"Retry-After": long}) == module.LONGEST_WAIT


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """The bundled target with a small context."""
    config = EngineConfig(dtype="float32", kv_cache_memory=1 << 26, max_model_len=64)
    llm = AsyncLLM(lambda: LLM(bundled("target"), None, config))
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def url(llm: AsyncLLM) -> Iterator[str]:
    """The same engine behind our own API."""
    app = create_app(llm, ServerSettings(model_names=("m",)))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()


def test_answers_are_the_engines(llm: AsyncLLM, url: str):
    chat = Chat("a:1", (user("def f(x):"),))
    how = SamplingParams(max_tokens=12, seed=1, temperature=0.9)

    async def run(answerer: Endpoint | EngineAnswerer) -> list[Regeneration]:
        return [
            await answerer.chat(chat, how),
            await answerer.complete("import os\n", PARAMS),
        ]

    async def by_endpoint() -> list[Regeneration]:
        async with open_endpoint(url, "m", 4) as endpoint:
            return await run(endpoint)

    answers, own = asyncio.run(by_endpoint()), asyncio.run(run(EngineAnswerer(llm)))
    assert answers == own
    assert [len(answer.token_ids) for answer in own] == [12, 9]
    assert [(answer.tokens, answer.cut) for answer in answers] == [(12, True), (9, True)]


def test_an_answer_that_ends_by_itself_is_whole(llm: AsyncLLM):
    how = SamplingParams(max_tokens=9, logit_bias={0: 100.0})
    answer = asyncio.run(EngineAnswerer(llm).complete("x", how))
    assert (answer.tokens, answer.cut) == (1, False)


def test_an_answer_that_fails_is_said_by_both(llm: AsyncLLM, url: str):
    """A partial answer is not trained on."""
    embedding = llm.llm.engine.core.target.embed.weight
    token = llm.llm.tokenize("x")[0]
    with tiny.nan_row(embedding, token):
        with pytest.raises(NoAnswerError, match="ended with an error: the target's logits"):
            complete(url)
        with pytest.raises(NoAnswerError, match="ended with an error: the target's logits"):
            asyncio.run(EngineAnswerer(llm).complete("x", PARAMS))


def test_a_full_context_is_said_by_both(llm: AsyncLLM, url: str):
    chat = Chat("a:1", (user("word " * 200),))
    with pytest.raises(NoAnswerError, match="maximum context length is 64 tokens"):
        asyncio.run(EngineAnswerer(llm).chat(chat, PARAMS))

    async def by_endpoint() -> None:
        async with open_endpoint(url, "m", 4) as endpoint:
            await endpoint.chat(chat, PARAMS)

    with pytest.raises(NoAnswerError, match="maximum context length is 64 tokens"):
        asyncio.run(by_endpoint())


def test_a_text_too_long_for_any_context_is_one_without_an_answer(llm: AsyncLLM):
    """It is refused before it is encoded; the others are answered all the same."""
    answerer, text = EngineAnswerer(llm), "word " * 100_000
    chat = Chat("a:1", (user(text),))
    for asked in (answerer.complete(text, PARAMS), answerer.chat(chat, PARAMS)):
        with pytest.raises(NoAnswerError, match="at least"):
            asyncio.run(asked)
