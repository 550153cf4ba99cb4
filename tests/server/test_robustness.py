"""Hostile, vanishing and too many clients; each test checks the engine afterwards."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import uvicorn
from conftest import KEY, NAME, Running, start
from uvicorn.server import ServerState

from peagle import SamplingParams
from peagle.server.body import MOST_TOLD
from peagle.server.connection import Connection
from peagle.server.service import Service
from peagle.server.settings import Limits, ServerSettings

PROMPT = "def fibonacci(n):\n"
LONG = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
pytestmark = pytest.mark.usefixtures("_clean")


def ask(
    server: Running, path: str, body: Any, method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and parsed body of one request."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=240)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {**HEADERS, **headers})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    kind = answer.headers.get("content-type", "")
    found = json.loads(text) if "json" in kind else text.decode()
    return answer.status, {k.lower(): v for k, v in answer.headers.items()}, found


def send(
    server: Running, body: dict[str, Any], missing: int = 0, request_id: str = "any"
) -> socket.socket:
    """Send a request, perhaps without the last bytes of its body."""
    data = json.dumps({**body, "stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=240)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"X-Request-Id: {request_id}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data[: len(data) - missing])
    return connection


def begin(server: Running, body: dict[str, Any], request_id: str = "any") -> socket.socket:
    """Send a request and read until its first event."""
    connection = send(server, body, request_id=request_id)
    seen = b""
    while b"data: " not in seen:
        seen += connection.recv(4096)
    return connection


def logged(caplog: pytest.LogCaptureFixture, request_id: str) -> list[logging.LogRecord]:
    """All that the log says of a request once it is over, which may be after its answer; requests
    of earlier tests may end meanwhile."""
    end = time.monotonic() + 120
    while True:
        lines = [one for one in caplog.records if vars(one).get("request_id") == request_id]
        if any(one.message == "request" for one in lines):
            return lines
        assert time.monotonic() < end, "the request was not logged"
        time.sleep(0.01)


@pytest.fixture
def small() -> Iterator[Running]:
    """A server that holds five sequences, four of them running."""
    settings = ServerSettings(
        model_names=(NAME,),
        api_keys=(KEY,),
        max_queue=1,
        drain_seconds=0.5,
        limits=Limits(body_bytes=4096),
    )
    for running in start(settings):
        yield running
        running.wait_until_idle()


def test_any_number_of_requests_may_wait_by_default(server: Running):
    with ExitStack() as waiting:
        for _ in range(1000):
            waiting.enter_context(server.service.admit(100))
        assert ask(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("missing", [0, 5])
def test_a_client_that_leaves_before_its_answer_is_no_error(
    server: Running, missing: int, caplog: pytest.LogCaptureFixture
):
    """While its body travels, or before the first token."""
    with caplog.at_level("INFO", logger="peagle.server"):
        send(server, LONG, missing, request_id=f"left-{missing}").close()
        logged(caplog, f"left-{missing}")
    server.wait_until_idle()
    assert all(record.levelname == "INFO" for record in caplog.records)
    assert ask(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_a_body_that_does_not_say_it_is_json_is_refused(server: Running, path: str, kind: str):
    status, _, found = ask(server, path, {"prompt": PROMPT}, **{"Content-Type": kind})
    assert status == 400
    assert "Content-Type: application/json" in found["error"]["message"]


def test_a_body_in_another_coding_is_refused_by_its_name(server: Running):
    status, _, found = ask(
        server, "/v1/completions", {"prompt": PROMPT}, **{"Content-Encoding": "br"}
    )
    assert status == 400
    assert "must be plain JSON" in found["error"]["message"]


def test_a_body_as_it_is_may_say_so(server: Running):
    asked = {"prompt": PROMPT, "max_tokens": 1}
    assert ask(server, "/v1/completions", asked, **{"Content-Encoding": "identity"})[0] == 200


def test_a_client_that_leaves_frees_its_blocks_at_once(
    server: Running, caplog: pytest.LogCaptureFixture
):
    """And the log tells it from one that read all."""
    engine = server.service.llm.engine
    with caplog.at_level("INFO", logger="peagle.server"):
        connection = begin(server, LONG, request_id="left-while-read")
        assert engine.core.busy
        connection.close()
        server.wait_until_idle()
        [request] = logged(caplog, "left-while-read")
    assert vars(request)["aborted"]
    _, _, text = ask(server, "/metrics", b"", "GET")
    assert re.search(r'finished_reason="abort".* [1-9]', text)


def test_a_client_that_leaves_before_its_answer_frees_its_blocks(server: Running):
    engine = server.service.llm.engine
    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps(LONG), HEADERS)
    while not engine.core.busy:
        time.sleep(0.01)
    connection.close()
    server.wait_until_idle()


def test_leaving_clients_change_nothing_for_others(server: Running, offline: Any):
    [wanted] = offline.generate([PROMPT], SamplingParams(max_tokens=200, ignore_eos=True))
    leaving = [begin(server, LONG) for _ in range(3)]
    found: list[Any] = []
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
    thread = threading.Thread(target=lambda: found.append(ask(server, "/v1/completions", body)[2]))
    thread.start()
    for connection in leaving:
        time.sleep(0.05)
        connection.close()
    thread.join()
    assert found[0]["choices"][0]["text"] == wanted.text


def test_a_full_queue_answers_429_and_recovers(small: Running):
    held = [begin(small, LONG) for _ in range(4)]
    waiting = begin_unanswered(small)
    status, headers, body = ask(small, "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    assert int(headers["retry-after"]) >= 1
    status, _, body = ask(small, "/v1/completions", {"prompt": "x", "n": 6})
    assert (status, body["error"]["param"]) == (400, "n")
    for connection in (*held, waiting):
        connection.close()
    small.wait_until_idle()
    assert ask(small, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    assert 'reason="queue"' in ask(small, "/metrics", b"", "GET")[2]


def begin_unanswered(server: Running) -> HTTPConnection:
    """A request that waits until others end."""
    before = server.service.admitted
    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", json.dumps(LONG), HEADERS)
    while server.service.admitted == before:
        time.sleep(0.01)
    return connection


def test_a_body_of_many_faults_is_told_the_first(server: Running):
    """A list of millions of errors takes gigabytes."""
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        wrong = {field: [{}] * 400_000}
        start = time.process_time()  # of server and client; others on the machine take none
        status, _, found = ask(server, path, wrong)
        assert (status, found["error"]["code"]) == (400, 400)
        assert time.process_time() - start < 3.0


def test_a_body_of_many_unknown_fields_is_read_at_once(
    server: Running, caplog: pytest.LogCaptureFixture
):
    """And the log stays short."""
    unknown = {f"field {n:x}": 1 for n in range(150_000)}
    start = time.process_time()
    with caplog.at_level("WARNING", logger="peagle.server"):
        status, _, _ = ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 1, **unknown})
    assert status == 200
    assert time.process_time() - start < 5.0
    assert sum("unknown field" in record.message for record in caplog.records) <= MOST_TOLD


def test_a_head_after_a_large_body_does_not_count_the_body(server: Running):
    """Both may come in one read."""
    body = json.dumps({"prompt": "x" * 120_000}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as connection:
        connection.sendall(head.encode() + body + b"GET /version HTTP/1.1\r\n")
        time.sleep(0.2)
        connection.sendall(b"Host: x\r\nConnection: close\r\n\r\n")
        seen = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert seen.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("last", [False, True])
def test_a_body_behind_an_offer_of_http_2_is_read(server: Running, last: bool):
    """As Java's HttpClient sends it."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    offer = {**offer, "Upgrade": "h2c"} if last else {"upgrade": "h2c", **offer}
    plain = ask(server, "/tokenize", {"prompt": PROMPT})
    assert plain[0] == 200
    assert ask(server, "/tokenize", {"prompt": PROMPT}, **offer)[::2] == plain[::2]


@pytest.mark.parametrize("cut", range(5))
def test_a_body_keeps_what_looks_like_an_offer(server: Running, cut: int):
    """Also if a read ends within the blank line before it. Without a line of it no answer came."""
    body = b"aa\r\nUpgrade: h2c\r\n\r\nbb"
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as connection:
        connection.sendall(head[: len(head) - cut])
        time.sleep(0.05)
        connection.sendall(head[len(head) - cut :] + body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")


def test_an_offer_that_is_met_too_late_ends_the_connection(server: Running):
    """Of two requests in one read the second makes it."""
    plain = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=240) as connection:
        connection.sendall(plain + b"\r\n" + plain + offer)
        seen = b"".join(iter(lambda: connection.recv(4096), b""))
    assert seen.count(b"HTTP/1.1 200") == 2
    assert seen.count(b"connection: close") == 1


@pytest.mark.parametrize(
    ("begin", "line"),
    [
        (b"GET / HTTP/1.1\r\n", b"X-Long: " + b"a" * 1000),
        (b"GET / HTTP/1.1\r\n", b"X-Many: a\r\n" * 100),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Many: a\r\n" * 100),
    ],
)
def test_a_head_or_trailer_without_an_end_is_refused(begin: bytes, line: bytes):
    """Connections as in `peagle serve`, over an application that answers everything."""
    config = uvicorn.Config(_fine, http=Connection, log_config=None, lifespan="off", ws="none")
    running, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    whole = b"GET / HTTP/1.1\r\nHost: x\r\n" + line[:60_000].strip() + b"\r\n\r\n"
    with socket.create_connection(listener.getsockname(), timeout=240) as connection:
        for _ in range(3):
            connection.sendall(whole)
            assert connection.recv(1000).startswith(b"HTTP/1.1 204")
        connection.sendall(begin)
        with pytest.raises(ConnectionError):
            connection.sendall(line * 20_000)
    running.should_exit = True
    thread.join()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 65_550, "longer than 65536 bytes"),
        (b"no request\r\n\r\n", "Invalid HTTP request"),
    ],
)
def test_what_is_no_request_is_refused_in_openai_form(sent: bytes, words: str):
    written, transport = bytearray(), Mock(asyncio.Transport)
    transport.write, transport.is_closing.return_value = written.extend, False
    config = uvicorn.Config(_fine, lifespan="off", log_config=None)
    connection = Connection(config, ServerState(), {}, Mock(asyncio.AbstractEventLoop))
    connection.connection_made(transport)
    connection.data_received(sent)
    assert transport.close.called
    head, _, body = bytes(written).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert f"content-length: {len(body)}" in head.decode().split("\r\n")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    assert words in error["message"]


def test_a_long_head_is_refused_even_if_it_is_read_at_once(server: Running):
    """A read takes up to 256 KiB."""
    for size, expected in ((65_000, 200), (65_537, 400), (100_000, 400)):
        status, headers, found = ask(server, "/version", b"", "GET", X="a" * size)
        assert (status, "x-request-id" in headers) == (expected, True)
    assert found["error"]["message"] == "the request's head is longer than 65536 bytes"
    assert ask(server, "/version?" + "a" * 65_537, b"", "GET")[0] == 400


async def _fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def test_a_large_body_is_refused_before_it_is_read(small: Running):
    body = {"prompt": "x" * 5000}
    status, _, found = ask(small, "/v1/completions", body)
    assert (status, found["error"]["message"]) == (413, "the body is larger than 4096 bytes")
    connection = HTTPConnection("127.0.0.1", small.port)
    parts = (json.dumps(body)[i : i + 500].encode() for i in range(0, 5000, 500))
    connection.request("POST", "/v1/completions", parts, HEADERS, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_draining_refuses_new_requests_and_ends_old_ones(small: Running):
    connection = begin(small, LONG)
    service = small.service
    thread = threading.Thread(target=lambda: asyncio.run(service.drain()))
    thread.start()
    while ask(small, "/health", b"", "GET")[0] != 503:
        time.sleep(0.01)
    status, headers, _ = ask(small, "/v1/completions", {"prompt": "x"})
    assert status == 503
    assert "retry-after" in headers
    thread.join()
    service.close()
    for failed, why in ((False, "the server is shutting down"), (True, "the engine failed")):
        with mock.patch.object(Service, "failed", failed):
            found = ask(small, "/v1/completions", {"prompt": "x"})[2]
        assert found["error"]["message"].startswith(why)
    rest = b""
    while data := connection.recv(1 << 16):
        rest += data
        if b"\r\n0\r\n\r\n" in rest:
            break
    assert b"shutting down" in rest
    connection.close()


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": NaN}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "x", "structured_outputs": {"json": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}}",
    b'{"prompt": "x", "logit_bias": {"1e9": 1}}',
    b'{"prompt": "x", "logit_bias": {"99999999999999999999": 1}}',
    b'{"prompt": [1.5]}',
    b'{"prompt": [true]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [99999999999999999999]}',
    b'{"prompt": "x", "stop_token_ids": [99999999999999999999]}',
]


@pytest.mark.parametrize("body", BODIES)
def test_malformed_bodies_are_refused_in_openai_form(server: Running, body: bytes):
    status, _, found = ask(server, "/v1/completions", body)
    assert status == 400
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["type"] == "invalid_request_error"


NEAR = "no such field; did you mean "
TEXT, IMAGE = {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "messages.0.content.1.type",
            [TEXT, IMAGE],
            "'image_url' is not supported; this model reads only text",
        ),
        ("messages.0.content.0.text", [{"type": "text"}], "Field required"),
        ("messages.0.content", 3, "Input should be a valid string"),
        ("stop.1", ["a", 3], "Input should be a valid string"),
        ("tool_choice.function.name", {"type": "function", "function": {}}, "Field required"),
        ("n", 0, "Input should be greater than or equal to 1"),
        ("str_eam", True, "no such field; did you mean stream?"),
        ("temprature", 1, "no such field; did you mean temperature?"),
        ("stream_options.include_usages", {"include_usages": 1}, NEAR + "include_usage?"),
        ("prompt_embeds", "AAAA", "not supported; leave it out"),
        ("chat_template", "{{ 1 }}", "not supported; leave it out"),
        ("best_of", 2, "not supported other than n; leave it out"),
        (
            "chat_template_kwargs.tokenize",
            {"tokenize": True},
            "tokenize is no variable of a template; leave it out",
        ),
    ],
)
def test_an_error_says_where_it_is(
    server: Running, path: str, field: str, value: Any, message: str
):
    """Also within fields of several types."""
    body = {"messages": [{"role": "user", "content": "x"}], "n": 1}
    if field.startswith("messages"):
        body["messages"][0]["content"] = value
    else:
        body[field.partition(".")[0]] = value
    status, _, found = ask(server, path, {**body, "Zzz": 0} if field == "n" else body)
    assert (status, found["error"]["param"]) == (400, field)
    assert found["error"]["message"] == f"{field}: {message}"


def test_values_that_disagree_are_told_without_our_names(server: Running):
    body = {"prompt": PROMPT, "max_tokens": 5, "min_tokens": 6}
    status, _, found = ask(server, "/v1/completions", body)
    assert (status, found["error"]["message"]) == (400, "min_tokens 6 is above max_tokens 5")


@pytest.mark.parametrize(
    ("path", "method", "status", "message"),
    [
        ("/nowhere", "GET", 404, "there is no /nowhere here; /openapi.json lists the routes"),
        ("/v1/completions", "GET", 405, "/v1/completions takes POST, not GET"),
        ("/v1/models/x", "GET", 404, "the model 'x' does not exist here, but 'demo'"),
    ],
)
def test_unknown_routes_answer_in_openai_form(
    server: Running, path: str, method: str, status: int, message: str
):
    found = ask(server, path, b"", method)
    assert found[0] == status
    assert (found[2]["error"]["code"], found[2]["error"]["message"]) == (status, message)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", b'{"prompt": "\\ud800"}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    ],
)
def test_half_a_character_is_refused_everywhere(server: Running, path: str, body: bytes):
    status, _, found = ask(server, path, body)
    assert status == 400
    assert any(word in found["error"]["message"] for word in ("Unicode", "hex escape"))


def test_hostile_templates_are_only_text(server: Running):
    content = "{{ cycler.__init__.__globals__ }}{% for i in range(10**9) %}x{% endfor %}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    assert ask(server, "/v1/chat/completions", body)[0] == 200
    given = body | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    assert ask(server, "/v1/chat/completions", given)[0] == 400
    given = body | {"chat_template": "{{ 1 }}"}
    assert ask(server, "/v1/chat/completions", given)[0] == 400
    assert ask(server, "/tokenize", given)[0] == 400


@pytest.mark.parametrize("path", ["/", "/health", "/load", "/ping", "/version", "/metrics"])
def test_open_routes_need_no_key(server: Running, path: str):
    assert ask(server, path, b"", "GET", Authorization="")[0] == 200


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, "Bearer é"])
@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize", "/openapi.json"])
def test_other_routes_need_one(server: Running, path: str, value: str):
    status, headers, found = ask(server, path, {"prompt": "x"}, Authorization=value)
    assert (status, found["error"]["type"]) == (401, "authentication_error")
    assert headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/", "/health", "/load", "/v1/models", "/metrics", "/nowhere"])
def test_head_is_get_without_a_body(server: Running, path: str):
    status, headers, _ = ask(server, path, b"", "GET")
    connection = HTTPConnection("127.0.0.1", server.port, timeout=240)
    connection.request("HEAD", path, headers=HEADERS)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (status, b"")
    assert answer.headers["content-type"] == headers["content-type"]
    connection.request("HEAD", "/v1/models")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (401, b""), "it needs a key, too"
    connection.close()


def test_the_load_is_what_waits_or_runs(server: Running):
    assert ask(server, "/load", b"", "GET")[2] == {"server_load": 0}
    connections = [begin(server, LONG) for _ in range(2)]
    assert ask(server, "/load", b"", "GET")[2] == {"server_load": 2}
    for connection in connections:
        connection.close()


TOO_LONG = "x " * 5000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}),
        ("/v1/completions", {"prompt": [5] * 5000, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}], "n": 2}),
        ("/invocations", {"messages": [{"role": "user", "content": TOO_LONG}]}),
        ("/invocations", {"prompt": TOO_LONG}),
    ],
)
def test_a_prompt_beyond_the_context_is_told_in_the_words_that_clients_know(
    server: Running, path: str, body: dict[str, Any]
):
    """They shorten the conversation then."""
    status, _, found = ask(server, path, body)
    error, most = found["error"], server.service.llm.engine.max_length
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["type"] == "invalid_request_error"
    assert f"; this model's maximum context length is {most} tokens, " in error["message"]


def test_a_malformed_history_is_told_by_its_message(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    template = (
        "{% for m in messages %}"
        "{% if m.role == 'tool' and loop.first %}{{ raise_exception('a result of no call') }}"
        "{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(server.service.llm.tokenizer, "chat_template", template)
    result = {"role": "tool", "tool_call_id": "1", "content": "done"}
    messages = [result, {"role": "user", "content": "a"}]
    for path in ("/v1/chat/completions", "/tokenize", "/invocations"):
        status, _, found = ask(server, path, {"messages": messages})
        assert (status, found["error"]["param"]) == (400, "messages")
        words = "messages.0: the chat template refuses this: a result of no call"
        assert found["error"]["message"].startswith(words)


def test_requests_keep_their_ids(server: Running):
    body = {"prompt": "x", "max_tokens": 1}
    for given in ("mine-7", "not a name"):
        _, headers, found = ask(server, "/v1/completions", body | {"request_id": given})
        assert found["id"] == f"cmpl-{headers['x-request-id']}"
        assert (headers["x-request-id"] == given) == (given == "mine-7")
    assert ask(server, "/health", b"", "GET", **{"X-Request-Id": "a-1"})[1]["x-request-id"] == "a-1"
    made = ask(server, "/health", b"", "GET", **{"X-Request-Id": "a b"})[1]["x-request-id"]
    assert len(made) == 32


def test_invocations_follow_the_shape_of_the_body(server: Running):
    status, _, found = ask(server, "/invocations", {"prompt": PROMPT, "max_tokens": 4})
    assert (status, found["object"]) == (200, "text_completion")
    messages = [{"role": "user", "content": "x"}]
    status, _, found = ask(server, "/invocations", {"messages": messages, "max_tokens": 4})
    assert (status, found["object"]) == (200, "chat.completion")
    assert ask(server, "/invocations", {"max_tokens": 4})[0] == 400


def test_tokenize_and_back(server: Running):
    _, _, found = ask(server, "/tokenize", {"prompt": PROMPT})
    assert found["count"] == len(found["tokens"])
    assert ask(server, "/detokenize", {"tokens": found["tokens"]})[2] == {"prompt": PROMPT}
    assert ask(server, "/tokenize", {"prompt": ""})[2]["tokens"] == []
    assert ask(server, "/tokenize", {})[0] == 400
    assert ask(server, "/detokenize", {"tokens": [4096]})[0] == 400


def test_a_conversation_is_tokenized_as_it_is_answered(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    template = "{{ tools }}{{ tone }}{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    monkeypatch.setattr(server.service.llm.tokenizer, "chat_template", template)
    tool = {"type": "function", "function": {"name": "look"}}
    seen = {"tools": [tool], "chat_template_kwargs": {"tone": "dry"}}
    body = {"messages": [{"role": "user", "content": "hello"}], **seen}
    _, _, answered = ask(server, "/v1/chat/completions", {**body, "max_tokens": 1})
    _, _, found = ask(server, "/tokenize", body)
    assert found["count"] == answered["usage"]["prompt_tokens"]
    said = ask(server, "/detokenize", {"tokens": found["tokens"]})[2]["prompt"]
    assert "look" in said
    assert said.endswith("dryhello")


def test_a_failing_step_ends_no_later_request(server: Running, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(server.service.llm.engine.core.worker, "exchange", fail)
        status, _, found = ask(server, "/v1/completions", {"prompt": "x"})
        assert (status, found["error"]["type"]) == (500, "server_error")
        assert "broken" not in found["error"]["message"]
    assert ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_a_sequence_that_fails_says_why(server: Running, caplog: pytest.LogCaptureFixture):
    """Its grammar turns out too complex."""
    grammar = "start: e\ne: /./ | e e | e e e"
    body = {"prompt": PROMPT, "max_tokens": 200, "structured_outputs": {"grammar": grammar}}
    with caplog.at_level("WARNING", logger="peagle.server"):
        status, _, found = ask(server, "/v1/completions", body)
    assert status == 400
    why = found["error"]["message"]
    assert why.startswith("structured outputs: ")
    [line] = [one.getMessage() for one in caplog.records]
    assert line.startswith("choice 0 of cmpl-")
    assert line.endswith(f" ended with an error: {why}")
    told = ask(server, "/v1/completions", body | {"stream": True})[2].splitlines()
    *events, error = [json.loads(line[6:]) for line in told if line.startswith("data: {")]
    assert error["error"]["message"] == why
    assert all("error" not in one for one in events)
    assert "data: [DONE]" not in told


@pytest.fixture
def shared() -> Iterator[Running]:
    """A server that pages of one other origin may call."""
    yield from start(
        ServerSettings(model_names=(NAME,), api_keys=(KEY,), allowed_origins=("https://a.example",))
    )


def test_pages_of_other_origins_ask_where_they_are_allowed_to(
    server: Running, shared: Running, monkeypatch: pytest.MonkeyPatch
):
    """And read why a request is refused."""
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    status, found, _ = ask(shared, "/v1/completions", b"", "OPTIONS", Authorization="", **asked)
    assert (status, found["access-control-allow-origin"]) == (200, "https://a.example")
    assert found["access-control-allow-headers"] == "authorization,content-type"
    private = {**asked, "Access-Control-Request-Private-Network": "true"}  # as Chromium asks
    status, found, _ = ask(shared, "/v1/completions", b"", "OPTIONS", Authorization="", **private)
    assert (status, found["access-control-allow-private-network"]) == (200, "true")
    monkeypatch.setattr(shared.service.metrics, "text", lambda: 1 // 0)
    answers = (("/v1/models", KEY, 200), ("/v1/models", "x", 401), ("/metrics", KEY, 500))
    for path, key, expected in answers:
        status, found, _ = ask(shared, path, b"", "GET", Authorization=f"Bearer {key}", **asked)
        assert (status, found["access-control-allow-origin"]) == (expected, "https://a.example")
        assert "x-request-id" in found["access-control-expose-headers"]
    asked["Origin"] = "https://b.example"
    assert ask(shared, "/v1/completions", b"", "OPTIONS", **asked)[0] == 400
    for running in (shared, server):
        found = ask(running, "/v1/models", b"", "GET", **asked)[1]
        assert "access-control-allow-origin" not in found


def test_a_path_is_one_word_of_the_log(server: Running, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="peagle.server"):
        named = {"X-Request-Id": "a-path"}
        assert ask(server, "/a%0Ainfo%20request%1b", {}, **named)[0] == 404
        [line] = logged(caplog, "a-path")
    assert vars(line)["path"] == "/a%0Ainfo%20request%1B"


def test_a_prompt_beyond_any_context_is_refused_unread(
    server: Running, monkeypatch: pytest.MonkeyPatch
):
    """Its letters tell; encoding takes up to 200 times its size."""
    body = {"prompt": "a b " * (1 << 19)}
    tokenizer = server.service.llm.tokenizer
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, **__: pytest.fail("it is encoded"))
    for path in ("/v1/completions", "/tokenize"):
        status, _, found = ask(server, path, body)
        assert status == 400
        assert "prompt is too long: at least " in found["error"]["message"]
    chat = {"messages": [{"role": "user", "content": body["prompt"]}]}
    for path in ("/v1/chat/completions", "/v1/messages/count_tokens"):
        assert ask(server, path, {"max_tokens": 1, **chat})[0] == 400


def test_who_is_next_is_said_only_where_that_is_allowed(server: Running):
    status, _, found = ask(server, "/v1/completions", {"prompt": "x", "priority": -1})
    assert (status, found["error"]["param"]) == (400, "priority")
    assert "--scheduling-policy priority" in found["error"]["message"]
    assert ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 1, "priority": 0})[0] == 200


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_grammar": "\n" * 60_000},
        {"guided_grammar": "root ::= {²}"},
        {"bad_words": ["a" * 4000] * 1000},
        {"n": 128, "max_tokens": 1900, "logprobs": 20},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_costs_too_much_is_refused_soon(server: Running, asked: dict[str, Any]):
    start = time.process_time()
    assert ask(server, "/v1/completions", {"prompt": "x", **asked})[0] == 400
    assert time.process_time() - start < 5.0


def test_a_form_that_is_too_slow_fails_alone(server: Running, monkeypatch: pytest.MonkeyPatch):
    """Its masks are timed; one beside it goes on. A mask takes some 10 ms: no processor is so fast
    that a fifth of the usual limit suffices."""
    monkeypatch.setattr("peagle.grammar_compiler.MASK_SECONDS", 1e-3)
    slow = {"prompt": "x", "max_tokens": 300, "guided_regex": "a" * 64_000}
    with begin(server, {"prompt": "x", "max_tokens": 300, "ignore_eos": True}) as beside:
        status, _, found = ask(server, "/v1/completions", slow)
        assert status == 400
        assert "too complex: it keeps other requests waiting" in found["error"]["message"]
        rest = b"".join(iter(lambda: beside.recv(1 << 16), b""))
    assert b"data: [DONE]" in rest


def test_a_form_whose_client_leaves_is_not_compiled_to_its_end(server: Running):
    """Nor does it keep a place in the queue."""
    patterns = {f"^[a-z]*{n}[a-z]*$": {"type": "string"} for n in range(330)}
    body = {"prompt": "x", "guided_json": {"type": "object", "patternProperties": patterns}}
    for _ in range(3):
        send(server, body).close()
    server.wait_until_idle()
    assert ask(server, "/v1/completions", {"prompt": "x", "guided_regex": "ab"})[0] == 200


def test_a_variable_that_is_a_field_is_refused(server: Running):
    body = {"messages": [{"role": "user", "content": "x"}]}
    body["chat_template_kwargs"] = {"add_special_tokens": True}
    status, _, found = ask(server, "/v1/chat/completions", body)
    assert status == 400
    assert "add_special_tokens" in found["error"]["message"]
