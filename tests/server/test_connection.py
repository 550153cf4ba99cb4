"""Connections have a time for a head, a body and the reading of answers, and a number."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest
from conftest import KEY, NAME, Running, start

from peagle.server.settings import ServerSettings

PATIENCE = 120.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def hurried() -> Iterator[Running]:
    """A server that waits for a second where others wait for a minute."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HEAD_SECONDS", "BODY_SECONDS", "UNREAD_SECONDS"):
            patch.setattr(f"peagle.server.connection.{name}", 1.0)
        yield from start(ServerSettings(model_names=(NAME,)), send_buffer=4096)


def connected(server: Running) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", server.port))
    line.settimeout(PATIENCE)
    return line


def everything(line: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    found = b""
    while part := line.recv(1 << 16):
        found += part
    return found


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /hea", b"HTTP/1.1 400"),
        (HEAD + b"Content-Length: 9\r\n\r\n{", b"HTTP/1.1 400"),
    ],
)
def test_what_does_not_come_in_time_is_not_waited_for(hurried: Running, sent: bytes, answer: bytes):
    """An idle connection is closed without a word, which a later request would read as its own."""
    with connected(hurried) as line:
        line.sendall(sent)
        assert everything(line).startswith(answer)


def test_requests_that_come_in_time_are_answered_however_long_that_takes(hurried: Running):
    with connected(hurried) as line:
        for _ in range(2):  # the second on a connection that was used
            body = json.dumps({"prompt": "x", "max_tokens": 120, "ignore_eos": True}).encode()
            line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert line.recv(100).startswith(b"HTTP/1.1 200")
            line.recv(1 << 20)


def test_an_answer_that_nobody_reads_ends(hurried: Running, caplog: pytest.LogCaptureFixture):
    """And its connection with it."""
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "logprobs": 20}
    with caplog.at_level("WARNING", logger="peagle.server"), socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", hurried.port))
        data = json.dumps(body).encode()
        line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        end = time.monotonic() + 2 * PATIENCE
        while "an answer was not read" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.05)
    hurried.wait_until_idle()


def test_pipelined_requests_are_bounded(server: Running):
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(server) as line:
        line.sendall(60 * request)
        found = b""
        while found.count(b"HTTP/1.1 200") < 60:
            found += line.recv(1 << 16)
    with connected(server) as line:
        line.sendall(2000 * request)
        assert b"HTTP/1.1 400" in everything(line)


def test_connections_beyond_the_limit_are_closed_and_told(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("peagle.server.connection._told", [float("-inf")])
    with connected(server), caplog.at_level("WARNING", logger="peagle.server"):
        monkeypatch.setattr("peagle.server.connection.MOST_CONNECTIONS", 0)
        with connected(server) as line, contextlib.suppress(ConnectionResetError):
            assert everything(line) == b""
        monkeypatch.undo()
    assert "0 connections are open; further ones are closed" in caplog.text


def test_keys_share_no_prefix(server: Running):
    """The usage would tell one what another has sent."""
    cached = []
    prompt = "class Secret:\n    pass\n" * 12
    for key in (KEY, "other", KEY):
        body = json.dumps({"prompt": prompt, "max_tokens": 8}).encode()
        with connected(server) as line:
            head = HEAD + b"Authorization: Bearer %s\r\nConnection: close\r\n" % key.encode()
            line.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            answer = json.loads(everything(line).partition(b"\r\n\r\n")[2])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
