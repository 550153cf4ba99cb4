"""Errors of the API, in OpenAI's form, and in Anthropic's on its routes."""

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from peagle.async_llm import EngineClosedError
from peagle.errors import ConfigError, ContextLengthError, InputError

CLIENT_GONE = 499
"""nginx's status for a client that left; only the log shows it."""
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
"""By statuses; other refusals are of an invalid request, or of the server's failure."""
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {**TYPES, 413: "request_too_large", 503: "overloaded_error"}


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What was wrong."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


class APIError(Exception):
    """A refusal with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        """code: what clients tell the refusal by; by default the status."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code or status
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        """What the client reads."""
        kind = self._type(TYPES, "server_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorBody(error=detail)

    @property
    def anthropic_body(self) -> AnthropicErrorBody:
        """What a client of Anthropic's API reads."""
        kind = self._type(ANTHROPIC_TYPES, "api_error")
        return AnthropicErrorBody(error=AnthropicErrorDetail(type=kind, message=self.message))

    def response_on(self, path: str = "") -> JSONResponse:
        """The body with its status and headers, in the form of a path's route."""
        body = self.anthropic_body if path.startswith(ANTHROPIC_PATH) else self.body
        return JSONResponse(body.model_dump(), self.status, self.headers)

    def _type(self, known: Mapping[int, str], failure: str) -> str:
        return known.get(self.status, "invalid_request_error" if self.status < 500 else failure)


def closing(failed: bool = False) -> APIError:
    """The refusal of requests during shutdown. failed: whether that is since the engine did."""
    why = "the engine failed, and the server ends with it; its log says why"
    return APIError(
        503, why if failed else "the server is shutting down", headers={"Retry-After": "10"}
    )


def unresponsive() -> APIError:
    """The refusal of requests while the engine is stuck, of which it may recover."""
    return APIError(503, "the engine does not respond", headers={"Retry-After": "10"})


def as_api_error(error: Exception) -> APIError:
    """The refusal for an exception; of an internal error the client learns nothing more."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, ConfigError):
        return APIError(400, error.told())
    if isinstance(error, ContextLengthError):
        return APIError(400, str(error), code="context_length_exceeded")
    if isinstance(error, InputError):
        return APIError(400, str(error))
    if isinstance(error, EngineClosedError):
        return closing(error.failed)
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    return APIError(500, "internal error; the server's log has the request's id")


def register_errors(app: FastAPI) -> None:
    """Answer every expected exception in the form of its route."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            error = _lost(request, error)
        return as_api_error(error).response_on(request.url.path)

    for kind in (APIError, InputError, EngineClosedError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def _lost(request: Request, error: HTTPException) -> APIError:
    """The refusal of a request that no route takes, which it names."""
    path, headers = request.url.path, error.headers or {}
    if error.status_code == 404:
        return APIError(404, f"there is no {path} here; /openapi.json lists the routes")
    if error.status_code == 405:
        message = f"{path} takes {headers.get('Allow')}, not {request.method}"
        return APIError(405, message, headers=headers)
    return APIError(error.status_code, str(error.detail), headers=headers)


def _validation_error(error: RequestValidationError) -> APIError:
    """The first error; where several types were tried, that of the one that parsed furthest."""
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {errors[0]['ctx']['error']}")
    told = [(_place(one, error.body), one["msg"].removeprefix("Value error, ")) for one in errors]
    first, _ = told[0]
    same = [one for one in told if one[0][: len(first)] == first]
    place, message = max(same, key=lambda one: len(one[0]))
    param = ".".join(place) or None
    return APIError(400, f"{param}: {message}" if param else message, param)


def _place(error: Mapping[str, Any], body: Any) -> list[str]:
    """The keys and indices that lead to an error, without the names of tried types.

    An error about a whole object names in its context the key that it is about.
    """
    place = []
    for part in error["loc"]:
        is_index = isinstance(body, list) and isinstance(part, int)
        if is_index or (isinstance(body, dict) and part in body):
            body = body[part]
            place.append(str(part))
    if error["type"] == "missing":
        return [*place, str(error["loc"][-1])]
    key = error.get("ctx", {}).get("key")
    return place if key is None else [*place, key]
