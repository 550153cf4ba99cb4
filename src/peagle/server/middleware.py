"""Around every route: request ids and the log, the limits on heads and bodies, the API key."""

import asyncio
import contextvars
import hashlib
import hmac
import itertools
import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.server.errors import APIError, closing

OPEN_PATHS = frozenset({"/", "/health", "/load", "/ping", "/ready", "/version", "/metrics"})
"""Routes that need no key: probes, scrapes and the page, which asks for the key itself."""
QUIET_PATHS = frozenset({"/health", "/load", "/ping", "/ready", "/metrics"})
"""Requested every few seconds; not worth a line each."""
FACTS = ("request_id", "method", "path", "status", "seconds", "client", "aborted")
"""What a log line holds besides its text."""
HEAD_BYTES = 64 << 10
"""Most bytes of a request's target and headers."""
KEY: contextvars.ContextVar[str | None] = contextvars.ContextVar("KEY", default=None)
"""Which of several keys the request has that is served in this context."""
ORIGIN: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("ORIGIN")
"""Of the request that is served in this context: its id, and where it stands in a trace."""
TRACE_HEADERS = ("traceparent", "tracestate")
GIVEN_ID = re.compile(r"[\w.-]{1,128}")
log = logging.getLogger("peagle.server")


class AccessLog:
    """Names each request, logs how it went, and turns an unexpected exception into a 500.

    The body may have another name for it. A server that shuts down cancels what is still open,
    and whoever has read nothing of an answer yet is told so.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        ORIGIN.set({"x-request-id": state["request_id"], **trace})
        start, status, whole = time.perf_counter(), 0, False

        async def send_named(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", state["request_id"].encode()))
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._app(scope, receive, send_named)
        except asyncio.CancelledError:
            log.warning("a request was cut off", extra={"request_id": state["request_id"]})
            if not status:
                await closing().response_on(scope["path"])(scope, receive, send_named)
        except Exception:
            log.exception("a request failed", extra={"request_id": state["request_id"]})
            if not status:
                refusal = APIError(500, f"internal error in request {state['request_id']}")
                await refusal.response_on(scope["path"])(scope, receive, send_named)
        finally:
            if scope["path"] not in QUIET_PATHS or status >= 500:
                facts = _facts(scope, status, start)
                log.info("request", extra=facts if whole else facts | {"aborted": True})


class HeadRequests:
    """Answers HEAD like GET; the connection sends no body to it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        return await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)


class SizeLimits:
    """Refuses heads that are too large, of which uvicorn reads several times more in one piece, and
    bodies that are, before reading them whole."""

    def __init__(self, app: ASGIApp, body: int) -> None:
        """body: most bytes of one."""
        self._app, self._limit = app, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        refusal = APIError(413, f"the body is larger than {self._limit} bytes")
        if _head_bytes(scope) > HEAD_BYTES:
            refusal = APIError(400, f"the request's head is longer than {HEAD_BYTES} bytes")
        elif not declared.isdecimal() or int(declared[:20]) <= self._limit:
            return await self._app(scope, self._counted(receive, refusal), send)
        return await refusal.response_on(scope["path"])(scope, receive, send)

    def _counted(self, receive: Receive, refusal: APIError) -> Receive:
        """The body's parts; raises for the one that is too much."""
        read = 0

        async def receive_counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise refusal
            return message

        return receive_counted


class Authentication:
    """Requires one of the keys on every route that is not open: OpenAI's header or Anthropic's."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        place = scope["path"].removeprefix(scope.get("root_path", ""))
        is_open = scope["type"] != "http" or place in OPEN_PATHS or not self._digests
        if is_open or (known := self._known(Headers(scope=scope))) is not None:
            KEY.set(None if is_open or len(self._digests) == 1 else known)
            return await self._app(scope, receive, send)
        error = APIError(401, "a valid API key is required", headers={"WWW-Authenticate": "Bearer"})
        return await error.response_on(scope["path"])(scope, receive, send)

    def _known(self, headers: Headers) -> str | None:
        """The digest of the key that is given; None: it is none of ours.

        Compares in a time that reveals nothing about the keys: all digests, every time.
        """
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        keys = (bearer if kind.lower() == "bearer" else "", headers.get("x-api-key", ""))
        given = [hashlib.sha256(key.strip().encode("latin-1")).digest() for key in keys]
        pairs = itertools.product(given, self._digests)
        matches = [known.hex() for one, known in pairs if hmac.compare_digest(one, known)]
        return matches[0] if matches else None


class LineFormatter(logging.Formatter):
    """One line per record: plain text, or a JSON object with the same facts."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        facts = {name: value for name, value in vars(record).items() if name in FACTS}
        text = record.getMessage()
        if record.exc_info:
            facts["error"] = self.formatException(record.exc_info)
        stamp = self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z")
        if self._as_json:
            head = {"time": stamp, "level": record.levelname.lower(), "event": text}
            return json.dumps(head | facts, ensure_ascii=False)
        shown = " ".join(f"{name}={value}" for name, value in facts.items())
        return f"{stamp} {record.levelname.lower()} {text} {shown}".rstrip()


def _head_bytes(scope: Scope) -> int:
    """Bytes of the target and of the headers with their separators."""
    target = len(scope["raw_path"]) + len(scope["query_string"])
    return target + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _facts(scope: Scope, status: int, start: float) -> dict[str, object]:
    return {
        "request_id": scope["state"]["request_id"],
        "method": scope["method"],
        "path": quote(scope["path"][:200]),
        "status": status or "-",
        "seconds": round(time.perf_counter() - start, 4),
        "client": scope["client"][0] if scope.get("client") else "-",
    }
