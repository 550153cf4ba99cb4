"""Answers by any server with OpenAI's API."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from peagle.config import SamplingParams
from peagle.configuration import parsed
from peagle.errors import InputError
from peagle.regenerate.answers import NoAnswerError, Regeneration
from peagle.server_url import authorized, server_url
from peagle.train.samples import Chat, Message

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds before each retry, if the server does not say how long to wait."""
LONGEST_WAIT = 60.0
"""Seconds, at most, that a server's wish is granted: it may be back earlier than it says."""
ANSWER_SECONDS, CONNECT_SECONDS = 3600.0, 10.0
OF_ONE_REQUEST = (400, 413, 422)
"""Statuses that refuse one request; others, such as 401 and 404, apply to all requests."""
FAILED, FAILURES = 500, 4
"""Status of a server that failed at a request, and how often it may until that one is given up."""
ENDED, CUT = ("stop", "tool_calls", "function_call"), "length"
"""Reasons for which the target itself ends an answer, and that of an answer which a limit ends."""
THOUGHTS = ("reasoning_content", "reasoning")
"""Names that servers give to what the model thought."""


@asynccontextmanager
async def open_endpoint(url: str, model: str, connections: int) -> AsyncIterator["Endpoint"]:
    """A server's API below `url`, such as http://host:8000/v1. Raises `InputError`."""
    server_url(url, "endpoint {} is not a URL; give one such as http://localhost:8000/v1")
    client = httpx2.AsyncClient(
        headers=authorized(),
        timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
        limits=httpx2.Limits(max_connections=connections),
    )
    async with client:
        yield Endpoint(client, url.rstrip("/"), model)


class Endpoint:
    """Answers by one model of a server; requests are retried while it is busy or down."""

    def __init__(self, client: httpx2.AsyncClient, url: str, model: str) -> None:
        self._client, self._url, self._model = client, url, model
        self._reached = False
        """Whether it has ever answered: one that never has is not waited for."""
        self._more: dict[str, Any] = {"return_token_ids": True}
        """What vLLM and peagle take; dropped for a server that refuses it."""

    async def chat(self, asked: Chat, params: SamplingParams) -> Regeneration:
        """The assistant's next turn; servers such as ours and vLLM take a template's variables."""
        more = {"tools": asked.tools, "chat_template_kwargs": asked.variables}
        shown = {name: value for name, value in more.items() if value}
        body = {"messages": asked.messages, **shown}
        choice, tokens = await self._ask("chat/completions", body, params)
        said = choice.get("message")
        if not isinstance(said, dict):
            raise self._unlike_openai()
        if said.get("refusal"):
            raise NoAnswerError(f"the server answers with a refusal: {said['refusal']}")
        return Regeneration(_message(said), tokens, _cut(choice), *_written(choice))

    async def complete(self, prompt: str, params: SamplingParams) -> Regeneration:
        """What follows a text, without a chat template."""
        choice, tokens = await self._ask("completions", {"prompt": prompt}, params)
        if not isinstance(choice.get("text"), str):
            raise self._unlike_openai()
        message = {"role": "assistant", "content": choice["text"]}
        return Regeneration(message, tokens, _cut(choice), *_written(choice))

    async def _ask(
        self, path: str, asked: dict[str, Any], params: SamplingParams
    ) -> tuple[dict[str, Any], int]:
        """The one choice of a request, and its number of tokens."""
        sent = {"max_tokens", "temperature", *(["seed"] if params.temperature > 0 else [])}
        body = {"model": self._model, **asked, **params.model_dump(include=sent)}
        more = self._more  # which another request's refusal may empty while this one waits
        try:
            answer = await self._post(path, {**body, **more})
        except NoAnswerError as error:
            if not any(name in str(error) for name in more):
                raise
            self._more = {}
            answer = await self._post(path, body)
        match answer:
            case {"choices": [{"finish_reason": "error", "error": {"message": str(why)}}, *_]}:
                raise NoAnswerError(f"an answer ended with an error: {why}")
            case {"choices": [{"finish_reason": "error"}, *_]}:
                raise NoAnswerError("an answer ended with an error")
            case {"choices": [dict(choice), *_]}:
                usage, read = answer.get("usage") or {}, answer.get("prompt_token_ids")
                tokens = usage.get("completion_tokens")
                whole = {"prompt_token_ids": read, **choice}
                return whole, tokens if isinstance(tokens, int) else 0
        raise self._unlike_openai()

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        failures = 0
        for pause in (*PAUSES, None):
            asked_to_wait = None
            try:
                response = await self._client.post(f"{self._url}/{path}", json=body)
            except httpx2.TransportError as error:
                problem = str(error) or type(error).__name__
                if not self._reached and isinstance(error, httpx2.ConnectError):
                    raise InputError(f"{self._url} cannot be reached: {problem}") from None
            else:
                self._reached = True
                if response.status_code != 429 and response.status_code < 500:
                    return self._read(response)
                problem = f"{response.status_code} {_complaint(response)}"
                failures += response.status_code == FAILED
                if failures == FAILURES:
                    raise NoAnswerError(f"an answer ended with an error: {_complaint(response)}")
                asked_to_wait = seconds_to_wait(response.headers)
            if pause is not None:
                await asyncio.sleep(pause if asked_to_wait is None else asked_to_wait)
        raise InputError(f"{self._url} does not answer: {problem}; the same command continues")

    def _read(self, response: httpx2.Response) -> Any:
        """The body of a response, None for what is no JSON; raises for a refusal."""
        if response.is_success:
            return parsed(response.content)
        refusal = f"{self._url} refuses: {response.status_code} {_complaint(response)}"
        if response.status_code == 404 and not self._url.endswith("/v1"):
            refusal += "; give its /v1 URL"
        if response.status_code in OF_ONE_REQUEST:
            raise NoAnswerError(refusal)
        raise InputError(refusal)

    def _unlike_openai(self) -> InputError:
        return InputError(f"{self._url} does not answer like OpenAI's API; give its /v1 URL")


def seconds_to_wait(headers: Mapping[str, str]) -> float | None:
    """The seconds that a Retry-After header asks for, within bounds; None where it names none."""
    try:
        return min(max(0.0, float(headers.get("Retry-After", ""))), LONGEST_WAIT)
    except ValueError:
        return None


def _message(said: Mapping[str, Any]) -> Message:
    """An assistant's turn with what a chat template may read."""
    message: Message = {"role": "assistant", "content": said.get("content") or ""}
    thoughts = next((said[name] for name in THOUGHTS if said.get(name)), None)
    if thoughts is not None:
        message["reasoning_content"] = thoughts
    if isinstance(said.get("tool_calls"), list) and said["tool_calls"]:
        message["tool_calls"] = said["tool_calls"]
    return message


def _written(choice: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the target wrote and those that it read; both empty unless all are told."""
    told = [choice.get(name) for name in ("token_ids", "prompt_token_ids")]
    if not all(isinstance(ids, list) and ids and type(ids[0]) is int for ids in told):
        return (), ()
    written, read = (tuple(ids or ()) for ids in told)
    return written, read


def _cut(choice: Mapping[str, Any]) -> bool:
    """Whether a limit ended the answer; raises where neither that nor the target did."""
    reason = choice.get("finish_reason")
    if reason not in (*ENDED, CUT):
        raise NoAnswerError(f"an answer was ended by neither the target nor a limit: {reason}")
    return reason == CUT


def _complaint(response: httpx2.Response) -> str:
    """The reason for a refusal: the message of an error object, else the start of the body."""
    match parsed(response.content):
        case {"error": {"message": str(message)}} | {"message": str(message)}:
            return message
    return response.text[:200]
