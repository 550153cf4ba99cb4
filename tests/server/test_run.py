"""The process: how it starts, drains, ends and starts again."""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from conftest import NAME, load
from process import BODY, Process

from peagle import AsyncLLM
from peagle.cli.app import main
from peagle.config import ChatConfig, EngineConfig
from peagle.errors import InputError
from peagle.pair import bundled
from peagle.server.run import Announce, DrainingServer, bind, serve
from peagle.server.service import Service
from peagle.server.settings import ServerSettings

PATIENCE = 200.0
"""Seconds, far more than anything here takes on an idle machine, fewer than a drain may take."""
WITH_TIME = """
import sys
from unittest import mock
from peagle.__main__ import main
with mock.patch("peagle.server.run.LAST", 60.0):
    sys.exit(main())
"""
"""On a busy machine it may take more than a second to tell those who wait."""
NODES = json.dumps(
    {"model": str(bundled("peagle")), "num_speculative_tokens": 5, "num_tree_nodes": 7}
)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def process(port: int, forked: None) -> Iterator[Process]:
    flags = ("--log-format", "json", "--drain-seconds", "240")
    running = Process(port, *flags, module=("-c", WITH_TIME))
    running.wait()
    yield running
    running.process.kill()
    running.process.wait()


@pytest.mark.parametrize(("gpu", "share"), [(True, 0.1), (False, 1)])
def test_requests_are_read_while_launches_keep_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, share: float
):
    """Launching threads yield it ten times as often as by Python's default."""
    usual, seen = sys.getswitchinterval(), []

    def run(self: DrainingServer, sockets: list[socket.socket]) -> None:
        seen.append(sys.getswitchinterval())

    monkeypatch.setattr(DrainingServer, "run", run)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    try:
        with bind("127.0.0.1", 0) as listener:
            llm = AsyncLLM(load)
            llm.llm.engine.runs_ahead = gpu
            serve(llm, ServerSettings(model_names=(NAME,)), listener)
    finally:
        sys.setswitchinterval(usual)
    assert seen == [pytest.approx(share * usual)]


@pytest.mark.parametrize(
    ("flags", "variable", "seconds"),
    [([], None, 180), ([], "65", 65), (["--timeout-keep-alive", "700"], "65", 700)],
)
def test_idle_connections_stay_open_for_longer_than_proxies_keep_theirs(
    flags: list[str], variable: str | None, seconds: int, monkeypatch: pytest.MonkeyPatch
):
    seen: list[int] = []

    def run(self: DrainingServer, sockets: list[socket.socket]) -> None:
        seen.append(self.config.timeout_keep_alive)

    monkeypatch.setattr(DrainingServer, "run", run)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr("peagle.server.run.end_on_sigterm", lambda: None)
    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", variable)
    assert main(["serve", "--port", "0", "--device", "cpu", *flags]) == 0
    assert seen == [seconds]


def test_a_server_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch):
    """With an exit code after which it is started again."""
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    llm = AsyncLLM(load)
    llm.failed = True  # as its thread leaves it
    with bind("127.0.0.1", 0) as listener:
        assert serve(llm, ServerSettings(model_names=(NAME,)), listener) == 1
    assert not llm.alive


def test_a_server_that_is_left_after_a_finding_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
):
    """Also where something that does not end keeps it from its own end."""
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    service = Service(AsyncLLM(load), ServerSettings(model_names=(NAME,)))
    service.distrusted = True
    DrainingServer(uvicorn.Config(""), service, print)._leave()
    assert codes == [1]


@pytest.mark.parametrize("draining", [False, True])
def test_a_signal_may_come_after_the_end(draining: bool, monkeypatch: pytest.MonkeyPatch):
    """One of several processes that has ended by itself is asked to, all the same."""
    monkeypatch.setattr(DrainingServer, "leave_after", lambda *_: None)
    service: Any = SimpleNamespace(draining=draining)
    server = DrainingServer(uvicorn.Config(""), service, print)
    server._loop = asyncio.new_event_loop()
    server._loop.close()
    server.handle_exit(signal.SIGUSR1, None)
    assert server.should_exit


def test_sigterm_lets_requests_finish(process: Process):
    answer = process.post({"prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True})
    first = answer.readline()
    process.process.send_signal(signal.SIGTERM)
    process.wait(status=503)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        process.post(BODY)
    rest = answer.read()
    assert first.startswith(b"data: ")
    assert rest.rstrip().endswith(b"data: [DONE]")
    _, errors = process.process.communicate(timeout=PATIENCE)
    assert process.process.returncode == 0
    events = [json.loads(line) for line in errors.splitlines()]
    said = [event["event"] for event in events]
    serving = f"serving peagle-demo on {process.url}, no reasoning"
    assert any(line.startswith(serving) for line in said)
    assert {"draining; Ctrl-C or SIGTERM again to stop now", "request"} <= {*said}
    requests = [event for event in events if event["event"] == "request"]
    assert all(event["request_id"] and "aborted" not in event for event in requests)


def test_a_killed_server_starts_again_as_if_nothing_had_been(process: Process, port: int):
    wanted = process.text()
    open_answer = process.post({"prompt": "x", "max_tokens": 1000, "stream": True})
    open_answer.readline()
    process.process.kill()
    process.process.wait()
    again = Process(port)
    try:
        again.wait()
        assert again.text() == wanted
    finally:
        again.process.kill()
        again.process.wait()


def test_a_body_that_never_comes_keeps_no_server(process: Process, port: int):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(head + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n{")
        assert half.recv(100).startswith(b"HTTP/1.1 100")  # it waits for the body
        process.process.send_signal(signal.SIGTERM)
        _, errors = process.process.communicate(timeout=PATIENCE)
    assert process.process.returncode == 0
    assert "a request was cut off" in errors
    assert "Traceback" not in errors


def test_a_second_signal_ends_at_once(process: Process):
    answer = process.post({"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True})
    answer.readline()
    process.process.send_signal(signal.SIGINT)
    process.wait(status=503)
    process.process.send_signal(signal.SIGINT)
    last = answer.read().strip().split(b"data: ")[-1]
    assert json.loads(last)["error"]["message"] == "the server is shutting down"
    _, errors = process.process.communicate(timeout=PATIENCE)
    assert process.process.returncode == 0
    assert "ASGI" not in errors


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/completions", {"type": "service_unavailable_error", "param": None, "code": 503}),
        ("/v1/messages", {"type": "overloaded_error"}),
    ],
)
def test_after_a_second_signal_an_open_answer_is_an_error_of_its_api(
    path: str, error: dict[str, object], process: Process
):
    asked = {"prompt": "x", "ignore_eos": True}
    if path == "/v1/messages":
        asked = {"messages": [{"role": "user", "content": "x"}]}
    body = json.dumps({**asked, "max_tokens": 1900}).encode()
    request = urllib.request.Request(process.url + path, body, {"Content-Type": "application/json"})
    with ThreadPoolExecutor() as beside:
        answer = beside.submit(urllib.request.urlopen, request, timeout=60)
        while json.load(urllib.request.urlopen(f"{process.url}/load"))["server_load"] == 0:
            time.sleep(0.01)
        process.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.process.send_signal(signal.SIGINT)
        _, errors = process.process.communicate(timeout=PATIENCE)
        with pytest.raises(urllib.error.HTTPError) as refused:
            answer.result()
    told = json.load(refused.value)["error"]
    assert refused.value.code == 503
    assert told == {"message": "the server is shutting down", **error}
    said = [json.loads(line)["event"] for line in errors.splitlines()]
    assert "draining; Ctrl-C or SIGTERM again to stop now" in said


def test_sigterm_while_loading_ends_it(port: int):
    loading = Process(port)
    while not listens(port):  # from then on it loads
        assert loading.process.poll() is None, loading.process.communicate()
        time.sleep(0.01)
    loading.process.send_signal(signal.SIGTERM)
    _, errors = loading.process.communicate(timeout=PATIENCE)
    assert loading.process.returncode == 0
    assert "serving" not in errors


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nonsense", "1"], "no such option: --nonsense"),
        (["--prot", "8001"], "no such option: --prot (did you mean --port?)"),
        (["a", "--prot=8001"], "no such option: --prot (did you mean --port?)"),
        (["a", "b"], "unexpected extra argument"),
        (["a", "--target", "b"], "a and --target b: give the target once"),
        (["--target", "a", "--prot", "8001"], "no such option: --prot (did you mean --port?)"),
        (["--drafter", "d", "--speculative-config", "{}"], "give either --speculative-config or"),
        (["--max-model-len", "0"], "peagle: --max-model-len: "),
        (["--gpu-memory-utilization", "2"], "peagle: --gpu-memory-utilization: "),
        (["--chat-template", "/nowhere"], "--chat-template /nowhere: No such file or directory"),
        (["--speculative-config", "{"], "not JSON"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1:"),
        (["--api-key", ""], "peagle: --api-key: "),
        (["--timeout-keep-alive", "0"], "peagle: --timeout-keep-alive: "),
        (["--served-model-name", ""], "peagle: --served-model-name: "),
        (["--allowed-origins", "https://a"], "--allowed-origins is not JSON"),
        (["--allowed-origins", "{}"], "peagle: --allowed-origins: give a list"),
        (["--allowed-origins", '["https://a/"]'], "peagle: --allowed-origins: "),
    ],
)
def test_bad_flags_end_in_one_line(flags: list[str], words: str, port: int):
    failed = Process(port, *flags)
    _, errors = failed.process.communicate(timeout=PATIENCE)
    assert failed.process.returncode == 2
    assert words in errors.splitlines()[-1]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("text", "words"),
    [("{{ messages }}\n{% if %}", "line 2: Expected an expression"), ("\n", "it is empty")],
)
def test_a_file_that_is_no_template_ends_it_at_once(
    port: int, tmp_path: Path, text: str, words: str
):
    file = tmp_path / "bad.jinja"
    file.write_text(text)
    failed = Process(port, "--chat-template", str(file))
    _, errors = failed.process.communicate(timeout=PATIENCE)
    assert failed.process.returncode == 2
    assert f"--chat-template {file}: {words}" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "drafter"),
    [
        ([], "the bundled one (P-EAGLE), K = 8"),
        (["--k", "3"], "the bundled one (P-EAGLE), K = 3"),
        ([str(bundled("target"))], "none: every token is the target's own"),
        (
            ["--target", str(bundled("target")), "--drafter", str(bundled("eagle3")), "--k", "2"],
            f"{bundled('eagle3')} (EAGLE-3), K = 2",
        ),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'],
            "none: drafts are looked up in the text, K = 4",
        ),
        (
            ["--speculative-config", NODES],
            "the bundled one (P-EAGLE), K = 5, branching for up to 1 at once",
        ),
    ],
)
def test_it_begins_with_what_it_serves_and_where(
    flags: list[str],
    drafter: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def serve(llm: AsyncLLM, _: object, __: object, announce: Announce) -> None:
        announce(llm, "http://0.0.0.0:8000")
        llm.close()

    monkeypatch.setattr("peagle.server.run.serve", serve)
    monkeypatch.setattr("peagle.server.run.end_on_sigterm", lambda: None)
    assert main(["serve", "--port", "0", "--dtype", "float32", "--device", "cpu", *flags]) == 0
    target = str(bundled("target"))
    named = target in flags
    told = capsys.readouterr().err.splitlines()
    if drafter == "none: every token is the target's own":
        assert "no drafter: every token is the target's own; --drafter" in told.pop(0)
    assert told == [
        "page     http://localhost:8000/",
        f"API      http://0.0.0.0:8000/v1 (model {target if named else 'peagle-demo'})",
        f"target   {target if named else 'the bundled one'}",
        f"drafter  {drafter}",
        "device   cpu, float32",
        "answers  no reasoning, tool calls as hermes; but the chat template shows no tools",
    ]


def test_a_json_log_begins_with_json(monkeypatch: pytest.MonkeyPatch):
    given: list[object] = []
    monkeypatch.setattr("peagle.async_llm.AsyncLLM", lambda _: None)
    monkeypatch.setattr("peagle.server.run.end_on_sigterm", lambda: None)
    monkeypatch.setattr("peagle.server.run.serve", lambda *all_of_it: given.append(all_of_it[3]))
    assert main(["serve", "--port", "0", "--log-format", "json"]) == 0
    assert given == [None]


@pytest.mark.parametrize("engine", ["peagle", "vllm"])
@pytest.mark.parametrize("value", ["", " \n"])
@pytest.mark.parametrize("name", ["PEAGLE_API_KEY", "VLLM_API_KEY"])
def test_a_key_of_nothing_does_not_let_everyone_in(
    engine: str,
    name: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("peagle.server.run.bind", lambda *_: pytest.fail("it lets everyone in"))
    monkeypatch.setattr("peagle.server.vllm.become", lambda *_: pytest.fail("so does vLLM"))
    assert main(["serve", "--engine", engine]) == 2
    assert f"{name} is empty; give a key" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["PEAGLE_API_KEY", "VLLM_API_KEY"])
@pytest.mark.parametrize(("flags", "keys"), [([], ("a b",)), (["--api-key", "c"], ("c",))])
def test_a_variable_holds_one_key(
    flags: list[str], keys: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
):
    """The flag takes precedence."""
    given: list[ServerSettings] = []
    monkeypatch.setenv(name, "a b\n")
    monkeypatch.setattr("peagle.async_llm.AsyncLLM", lambda _: None)
    monkeypatch.setattr("peagle.server.run.end_on_sigterm", lambda: None)
    monkeypatch.setattr("peagle.server.run.serve", lambda llm, settings, *_: given.append(settings))
    assert main(["serve", "--port", "0", *flags]) == 0
    assert given[0].api_keys == keys


def test_two_servers_draw_different_tokens_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    given: list[EngineConfig] = []
    monkeypatch.setattr(
        "peagle.cli.serve.open_async_llm", lambda *all_of_it: given.append(all_of_it[2])
    )
    monkeypatch.setattr("peagle.server.run.end_on_sigterm", lambda: None)
    monkeypatch.setattr("peagle.server.run.serve", lambda *_: 0)
    for flags in ([], [], ["--seed", "0"]):
        assert main(["serve", "--port", "0", "--log-format", "json", *flags]) == 0
    seeds = [config.seed for config in given]
    assert len({*seeds}) == 3
    assert seeds[2] == 0


@pytest.mark.usefixtures("forked")
def test_a_taken_port_is_told_before_loading(port: int):
    with socket.create_server(("127.0.0.1", port)):
        failed = Process(port)
        _, errors = failed.process.communicate(timeout=PATIENCE)
    assert failed.process.returncode == 2
    complaint = f"cannot listen on 127.0.0.1:{port}: Address already in use; give another --port"
    assert complaint in errors


def test_of_two_that_take_one_port_the_second_is_told(port: int):
    """While the first still loads."""
    with bind("127.0.0.1", port), pytest.raises(InputError, match=f"listen on 127.0.0.1:{port}"):
        bind("127.0.0.1", port)


def test_one_that_is_overtaken_before_it_listens_is_told(
    port: int, monkeypatch: pytest.MonkeyPatch
):
    with contextlib.ExitStack() as first:

        def listen(second: socket.socket, backlog: int) -> None:
            monkeypatch.undo()
            first.enter_context(bind("127.0.0.1", port))
            second.listen(backlog)

        monkeypatch.setattr(socket.socket, "listen", listen)
        with pytest.raises(InputError, match=f"listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)


def test_it_says_that_it_serves_once_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)

    async def fail(*_: object, **__: object) -> None:
        raise OSError("cannot listen")

    monkeypatch.setattr(uvicorn.Server, "startup", fail)
    with (
        caplog.at_level("INFO", logger="peagle.server"),
        bind("127.0.0.1", 0) as listener,
        pytest.raises(OSError, match="cannot listen"),
    ):
        serve(AsyncLLM(load), ServerSettings(model_names=(NAME,)), listener)
    assert "serving" not in caplog.text


@pytest.mark.parametrize("given", [True, False])
def test_a_broken_chat_template_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: bool
):
    """One that is given, and the tokenizer's own."""
    monkeypatch.setattr(DrainingServer, "run", lambda *_, **__: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    llm = AsyncLLM(load)
    broken = "{{ messages"
    if given:
        llm.llm.chat_config = ChatConfig(chat_template=broken)
    else:
        monkeypatch.setattr(llm.llm.tokenizer, "chat_template", broken)
    with bind("127.0.0.1", 0) as listener:
        serve(llm, ServerSettings(model_names=(NAME,)), listener)
    assert "a plain question fails: the chat template refuses" in caplog.text
