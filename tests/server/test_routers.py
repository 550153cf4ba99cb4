"""Two servers behind the routers of docs/deploy/replicas.md, where these are installed."""

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from process import BODY, Process

ROOT = Path(__file__).parents[2]
CONFIGURATION = (ROOT / "deploy" / "nginx.conf").read_text()
PAGE = (ROOT / "docs" / "deploy" / "replicas.md").read_text()
PATIENCE = 240.0
"""Seconds, far more than anything here takes on an idle machine."""


def free_ports(count: int) -> list[int]:
    with ExitStack() as open_sockets:
        taken = [
            open_sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in taken]


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[str]:
    """A router in front of the servers, once it answers."""
    router = subprocess.Popen(command)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/v1/models", timeout=10)
                break
            except OSError:
                assert router.poll() is None
                assert time.monotonic() < end
                time.sleep(0.2)
        yield url
    finally:
        router.terminate()
        router.wait()


def ask(url: str, **headers: str) -> str:
    data = json.dumps(BODY | {"model": "demo"}).encode()
    named = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{url}/v1/completions", data, named)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def asked(servers: Sequence[Process]) -> list[int]:
    """How many requests each has answered."""
    counts = []
    for server in servers:
        page = urllib.request.urlopen(f"{server.url}/metrics", timeout=PATIENCE).read().decode()
        found = re.findall(r"^vllm:request_success_total\{.* (\d+)\.0$", page, re.MULTILINE)
        counts.append(sum(map(int, found)))
    return counts


@pytest.fixture
def servers(forked: None) -> Iterator[list[Process]]:
    each = [Process(port, "--served-model-name", "demo") for port in free_ports(2)]
    for one in each:
        one.wait()
    yield each
    for one in each:
        one.process.kill()
        one.process.communicate()


def check(url: str, servers: Sequence[Process]) -> None:
    """A session stays on one server; where one drains, or is killed, the other one answers."""
    before = asked(servers)
    text = servers[0].text()
    for _ in range(3):
        assert ask(url, **{"X-Session-Id": "mine"}) == text
    now = asked(servers)
    got = [after - then for after, then in zip(now, before, strict=True)]
    assert sorted(got) in ([0, 4], [1, 3])
    mine = got.index(max(got))
    servers[mine].process.send_signal(signal.SIGTERM)
    assert ask(url, **{"X-Session-Id": "mine"}) == text


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx(servers: list[Process], tmp_path: Path):
    [front] = free_ports(1)
    text = CONFIGURATION.replace("listen 8000", f"listen 127.0.0.1:{front}")
    for port, server in zip((8001, 8002), servers, strict=True):
        text = text.replace(f"127.0.0.1:{port}", server.url.removeprefix("http://"))
    (tmp_path / "nginx.conf").write_text(text)
    own = f"daemon off; pid {tmp_path}/pid; error_log stderr;"
    command = ["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-g", own]
    with running(command, front) as url:
        check(url, servers)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/metrics", timeout=10)


@pytest.mark.skipif(shutil.which("smg") is None, reason="smg is not installed")
def test_smg(servers: list[Process]):
    front, metrics = free_ports(2)
    [line] = [line for line in PAGE.splitlines() if line.startswith("smg launch")]
    line = line.replace("0.0.0.0 --port 8000", f"127.0.0.1 --port {front}")
    for port, server in zip((8001, 8002), servers, strict=True):
        line = line.replace(f"http://localhost:{port}", server.url)
    with running([*line.split(), "--prometheus-port", str(metrics)], front) as url:
        check(url, servers)


def test_nginx_asks_the_servers_of_the_page_and_keeps_no_line_longer_than_they_do():
    """And neither gathers tokens nor cuts long answers off; as read, where nothing can be run."""
    directives: list[Any] = re.findall(r"^\s*([a-z_]+) ([^;{]+);", CONFIGURATION, re.MULTILINE)
    told = dict(directives)
    ports = re.findall(r"--port (80\d\d)", PAGE)
    assert re.findall(r"server 127\.0\.0\.1:(\d+)", CONFIGURATION) == ports[:2]
    assert told["listen"] == ports[2]
    assert told["proxy_buffering"] == "off"
    assert (told["proxy_http_version"], told["proxy_pass"]) == ("1.1", "http://peagle")
    assert int(told["proxy_read_timeout"].removesuffix("s")) >= 600
    assert "keepalive_timeout" not in told, "nginx's 60 s are below the servers' 180"
    assert CONFIGURATION.count("{") == CONFIGURATION.count("}")
