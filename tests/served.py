"""A scripted target behind the application, and what its clients read."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from scripted import Script, scripted_llm, writing

from peagle import AsyncLLM
from peagle.server.app import create_app
from peagle.server.settings import ServerSettings

T = TypeVar("T")
OF_VLLM: list[tuple[str, Any]] = [
    ("cache_salt", "tenant"),
    ("structured_outputs", {"choice": ["yes", "no"]}),
    ("guided_regex", "a+"),
    ("logit_bias", {"3": 5.0}),
    ("allowed_token_ids", [3]),
    ("bad_words", ["no"]),
    ("stop_token_ids", [3]),
    ("min_tokens", 2),
    ("ignore_eos", True),
    ("truncate_prompt_tokens", 9),
    ("priority", 3),
]
"""Fields of vLLM's that every API takes, and values with an effect."""


@dataclass(frozen=True)
class Served:
    """One family's scripted target behind the application."""

    name: str
    app: Any
    script: Script

    def post(self, path: str, body: Any, text: str = "", **headers: str) -> httpx2.Response:
        """The answer to a request, for which the target writes a text."""

        async def ask(client: httpx2.AsyncClient) -> httpx2.Response:
            return await client.post(path, json=body, headers=headers)

        return self.talk(ask, text)

    def talk(self, use: Callable[[httpx2.AsyncClient], Awaitable[T]], text: str = "") -> T:
        """What comes of using the application while the target writes a text."""

        async def run() -> T:
            transport = httpx2.ASGITransport(self.app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                return await use(client)

        with writing(self.script, self.name, text):
            return asyncio.run(run())


@contextmanager
def serving(name: str, directory: Path, **settings: Any) -> Iterator[Served]:
    """Serve a family's scripted target."""
    llm, script = scripted_llm(name, directory)
    app = create_app(AsyncLLM(lambda: llm), ServerSettings(model_names=("demo",), **settings))
    yield Served(name, app, script)
    app.state.service.close()


def named_events(answer: httpx2.Response) -> list[dict[str, Any]]:
    """A stream's events, each of which has its type as its name."""
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
