"""Any server of OpenAI's API: what it is, and one streamed answer."""

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from httpx2 import URL

from peagle.bench.http import HttpSession, Reply
from peagle.bench.prompts import Prompt
from peagle.bench.server_metrics import DraftCounts
from peagle.config import SamplingParams
from peagle.configuration import parsed
from peagle.errors import InputError, reason
from peagle.server_url import authorized, server_url

SILENCE = 120.0
"""Seconds without a byte after which a request has failed."""
A_WHILE = 1.0
"""Seconds by which that may be less."""
OPTIONAL: Mapping[str, str] = {
    "cache_salt": "its prefix cache may answer prompts from the second round on",
    "ignore_eos": "answers end where the model ends them, so their lengths differ",
    "stream_options": "it does not count tokens",
}
"""Fields that a server may refuse, and what a reader must know then."""
REFUSED = (400, 404, 405, 415, 422)
"""Statuses by which servers refuse a body."""
WORDS = "text", "content", "reasoning", "reasoning_content"
"""Where answers have text; thoughts may be there under both names."""
CONTENT = "text", "content"
"""Those that a conversation goes on from."""
SENT = {"max_tokens", "temperature", "seed", "ignore_eos"}
"""Sampling fields that are always sent."""
CHANGED = {"stop", "top_k", "top_p", "min_p"}
"""Those that are sent where they are not the default."""


class RequestFailedError(Exception):
    """A request without an answer, and why."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Observation:
    """What one request's client saw."""

    times: tuple[float, ...]
    """Seconds from its start to each token; those of a piece of the stream share its time."""
    text: str
    """All that it said: thoughts, content and calls."""
    content: str
    """What a conversation goes on from."""
    counted: bool
    """Whether the server said how many tokens it wrote; else each piece is one."""


@dataclass
class Server:
    """A server, and which fields it takes."""

    name: str
    root: URL
    model: str
    version: str = ""
    refused: tuple[str, ...] = ()
    """Those of `OPTIONAL` that are left out."""
    notes: list[str] = field(default_factory=list)
    """What a reader of its figures must know."""

    @classmethod
    async def find(cls, name: str, url: str, model: str | None) -> Self:
        """Ask a server for its model and version. Raises `InputError` when it does not answer."""
        root = server_url(url)
        try:
            async with asyncio.timeout(SILENCE), HttpSession(root, authorized()) as connection:
                models = await connection.get("/v1/models")
                version = await connection.get("/version")
        except (OSError, EOFError, ValueError) as error:
            raise InputError(f"{url} does not answer: {reason(error) or 'timeout'}") from None
        served, *_ = _objects(_json(models).get("data")) or [{}]
        model = model or served.get("id")
        if not model:
            found = "has no" if models is None else "names no model at"
            raise InputError(
                f"{url} {found} /v1/models; check the address, or give the model's name as TARGET"
            )
        by = served.get("owned_by", "")
        told = f"{by} {_json(version).get('version', '')}".strip()
        return cls(name, root, model, told)

    def connect(self) -> HttpSession:
        """A new connection."""
        return HttpSession(self.root, authorized())

    async def draft_counts(self) -> DraftCounts | None:
        """What it has drafted so far; None where it does not tell."""
        try:
            async with asyncio.timeout(SILENCE), self.connect() as connection:
                page = await connection.get("/metrics")
        except (OSError, EOFError, ValueError):
            return None
        return None if page is None else DraftCounts.read(page.decode(errors="replace"))

    async def learn(self, prompt: Prompt, params: SamplingParams) -> None:
        """Ask once, and find out which fields it refuses. Raises `InputError` if all fails."""
        first: RequestFailedError | None = None
        for refused in self._refusals():
            self.refused = refused
            try:
                async with self.connect() as connection:
                    answer = await self.answer(connection, prompt, params, "warm-up")
            except RequestFailedError as error:
                first = first or error
                if error.status not in REFUSED:
                    break
                continue
            self._note(answer)
            return
        raise InputError(f"{self.name}: {first}")

    def _refusals(self) -> Iterator[tuple[str, ...]]:
        """Fields to leave out, fewest first."""
        for count in range(len(OPTIONAL) + 1):
            yield from itertools.combinations(OPTIONAL, count)

    def _note(self, answer: Observation) -> None:
        for name in self.refused:
            self.note(f"refuses {name}: {OPTIONAL[name]}")
        if not answer.counted:
            self.note("sends no usage: a piece of its stream counts as a token, and may be several")

    def note(self, text: str) -> None:
        """Keep a sentence, once."""
        told = f"{self.name} {text}"
        if told not in self.notes:
            self.notes.append(told)

    async def answer(
        self,
        connection: HttpSession,
        prompt: Prompt,
        params: SamplingParams,
        salt: str,
        due: float | None = None,
    ) -> Observation:
        """One answer. salt: requests with different ones share no cached prefix. due: when the
        request was to be sent, from which times count; None: when it is.

        Raises `RequestFailedError`.
        """
        path = "/v1/chat/completions" if prompt.messages else "/v1/completions"
        body = json.dumps(self._body(prompt, params, salt)).encode()
        start = time.perf_counter() if due is None else due
        hang_up = True
        try:
            async with asyncio.timeout(SILENCE) as silence:
                reply = await connection.ask("POST", path, body)
                if reply.status != 200:
                    raise RequestFailedError(await _complaint(reply), reply.status)
                answer = await _read(reply, start, silence)
            hang_up = reply.last
            return answer
        except TimeoutError:
            raise RequestFailedError(f"nothing came for {SILENCE:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            raise RequestFailedError(reason(error) or type(error).__name__) from None
        finally:
            if hang_up:
                connection.close()

    def _body(self, prompt: Prompt, params: SamplingParams, salt: str) -> dict[str, Any]:
        asked = {"messages": prompt.messages} if prompt.messages else {"prompt": prompt.text}
        body: dict[str, Any] = {
            "model": self.model,
            **asked,
            **params.model_dump(include=SENT),
            **params.model_dump(include=CHANGED, exclude_defaults=True),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
        return {name: value for name, value in body.items() if name not in self.refused}


async def _read(reply: Reply, start: float, silence: asyncio.Timeout) -> Observation:
    """An answer's pieces as they come."""
    if not reply.streams:
        raise RequestFailedError("it does not stream")
    times: list[float] = []
    texts: list[str] = []
    contents: list[str] = []
    tokens: int | None = None
    clock = asyncio.get_running_loop()
    heard = clock.time()

    def hear() -> None:
        """Any part of a stream, such as a comment, is no silence."""
        nonlocal heard
        if (now := clock.time()) > heard + A_WHILE:  # a timer for each piece would cost more
            heard = now
            silence.reschedule(heard + SILENCE)

    async for event in reply.events(hear):
        if event.get("error") or event.get("object") == "error":
            raise RequestFailedError(_message(event))
        tokens = _tokens(event, tokens)
        piece, content = _said(event)
        if piece or (_ends(event) and not times):  # an answer may be its end alone
            times.append(time.perf_counter() - start)
            texts.append(piece)
            contents.append(content)
    if not times:
        raise RequestFailedError("it streamed no text")
    shared = _shared(times, tokens or len(times))
    return Observation(shared, "".join(texts), "".join(contents), tokens is not None)


def _shared(times: Sequence[float], tokens: int) -> tuple[float, ...]:
    """A time for each token: a stream's pieces share the tokens evenly, the first has one, and the
    last token comes with the last piece."""
    pieces = len(times)
    if tokens < pieces:
        last, steps = pieces - 1, max(tokens - 1, 1)
        places = [last - round(last * place / steps) for place in range(tokens)]
        return tuple(times[place] for place in reversed(places))
    if pieces == 1:
        return (times[0],) * tokens
    ends = [1 + round((tokens - 1) * place / (pieces - 1)) for place in range(pieces)]
    each = [ends[0], *(end - start for start, end in itertools.pairwise(ends))]
    return tuple(time for time, count in zip(times, each, strict=True) for _ in range(count))


def _said(answer: Mapping[str, Any]) -> tuple[str, str]:
    """What an answer, or its part, says, and of it the content; nothing where it has another form
    than OpenAI's."""
    said = [_texts(choice) for choice in _objects(answer.get("choices"))]
    return "".join(text for text, _ in said), "".join(content for _, content in said)


def _ends(answer: Mapping[str, Any]) -> bool:
    """Whether an answer, or its part, says why it ended."""
    return any(choice.get("finish_reason") for choice in _objects(answer.get("choices")))


def _texts(choice: Mapping[str, Any]) -> tuple[str, str]:
    """What a choice, or its part, says: text, thoughts, or a call; and of it the content."""
    told = _object(choice.get("delta") or choice.get("message") or choice)
    said = {name: told[name] for name in WORDS if isinstance(told.get(name), str)}
    calls = json.dumps(told["tool_calls"]) if told.get("tool_calls") else ""
    content = dict.fromkeys(said[name] for name in CONTENT if name in said)
    return "".join(dict.fromkeys(said.values())) + calls, "".join(content)


def _tokens(event: Mapping[str, Any], before: int | None) -> int | None:
    found = _object(event.get("usage")).get("completion_tokens")
    return found if isinstance(found, int) and found > 0 else before


async def _complaint(reply: Reply) -> str:
    body = (await reply.body()).decode(errors="replace")
    return f"HTTP {reply.status}: {_message(_json(body.encode())) or body[:200] or 'no reason'}"


def _message(body: Mapping[str, Any]) -> str:
    """Why a server refuses, on one line."""
    error = body.get("error") or body.get("detail") or body.get("message") or ""
    told = error.get("message", "") if isinstance(error, dict) else error
    return " ".join(str(told).split())


def _json(body: bytes | None) -> dict[str, Any]:
    """A JSON object; nothing for what is none."""
    return _object(parsed(body or b""))


def _object(found: Any) -> dict[str, Any]:
    """What was read, if it is an object; else an empty one."""
    return found if isinstance(found, dict) else {}


def _objects(found: Any) -> list[dict[str, Any]]:
    """What was read, if it is a list, in it what is no object as an empty one; else nothing."""
    return [_object(one) for one in found] if isinstance(found, list) else []


def most_common(reasons: Iterable[str]) -> str:
    """The reason that most requests failed for."""
    return Counter(reasons).most_common(1)[0][0]
