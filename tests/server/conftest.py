"""One real server per session over the bundled pair, and the same engine without it."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import uvicorn
from blocks import check_blocks
from openai import OpenAI

from peagle import LLM, AsyncLLM, EngineConfig, SpeculativeConfig
from peagle.pair import bundled
from peagle.server.app import create_app
from peagle.server.connection import Connection
from peagle.server.service import Service
from peagle.server.settings import ServerSettings

K = 7
KEY = "sesame"
NAME = "demo"


def load() -> LLM:
    """The bundled pair; with 4 rows, some requests have to wait."""
    speculation = SpeculativeConfig(model=str(bundled("peagle")), num_speculative_tokens=K)
    room = {"max_num_seqs": 4, "kv_cache_memory": 1 << 26}
    config = EngineConfig(dtype="float32", draft_length="fixed", **room)
    return LLM(bundled("target"), speculation, config)


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request leaves out is logged once a process; so that tests agree in any order."""
    monkeypatch.setattr("peagle.server.body._told", set())


@dataclass(frozen=True)
class Running:
    """A running server."""

    url: str
    port: int
    service: Service

    def wait_until_idle(self, seconds: float = 120.0) -> None:
        """Fail unless every request and block is freed in time."""
        engine, end = self.service.llm.engine, time.monotonic() + seconds
        while engine.core.busy or self.service.admitted:
            assert time.monotonic() < end, "a request was left behind"
            time.sleep(0.01)
        blocks = engine.core.blocks
        check_blocks(blocks)
        assert sum(blocks.free_by_group()) == blocks.num_blocks


def start(
    settings: ServerSettings, load: Callable[[], LLM] = load, send_buffer: int | None = None
) -> Iterator[Running]:
    """Serve in a thread until the test is over. send_buffer: the system's, of each connection."""
    app = create_app(AsyncLLM(load), settings)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, http=Connection, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Running(f"http://127.0.0.1:{port}", port, app.state.service)
    server.should_exit = True
    thread.join()
    app.state.service.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    yield from start(ServerSettings(model_names=(NAME, "alias"), api_keys=("other", KEY)))


@pytest.fixture
def _clean(server: Running) -> Iterator[None]:
    """No test leaves a request or a block behind."""
    yield
    server.wait_until_idle()


@pytest.fixture(scope="session")
def offline() -> LLM:
    """The same engine, called directly."""
    return load()


@pytest.fixture(scope="session")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
