"""The application: its routes and middleware."""

from collections.abc import Callable, Coroutine, Mapping
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.middleware.cors import CORSMiddleware

from peagle.async_llm import AsyncLLM
from peagle.server.anthropic.route import count_tokens, create_message
from peagle.server.body_route import BodyRoute, validated
from peagle.server.chat import chat
from peagle.server.completions import complete
from peagle.server.errors import AnthropicErrorBody, ErrorBody, register_errors
from peagle.server.middleware import AccessLog, Authentication, HeadRequests, SizeLimits
from peagle.server.protocol import ChatBody, CompletionBody, Invocation
from peagle.server.responses.route import respond
from peagle.server.service import Service
from peagle.server.settings import ServerSettings
from peagle.server.tokens import detokenize, tokenize


async def invoke(body: Invocation, request: Request) -> Response:
    """SageMaker's route: a body with messages is a conversation, one with a prompt is not."""
    if "messages" in body.root:
        return await chat(validated(ChatBody, body.root), request)
    return await complete(validated(CompletionBody, body.root), request)


Answers = dict[int | str, dict[str, Any]]
Endpoint = Callable[..., Coroutine[Any, Any, Response | Mapping[str, Any]]]
REFUSALS: Answers = {status: {"model": ErrorBody} for status in ("4XX", "5XX")}
ANTHROPIC_REFUSALS: Answers = {status: {"model": AnthropicErrorBody} for status in ("4XX", "5XX")}
ANSWER: Answers = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}
ROUTES: Mapping[str, tuple[Endpoint, Answers]] = {
    "/v1/completions": (complete, ANSWER),
    "/v1/chat/completions": (chat, ANSWER),
    "/invocations": (invoke, ANSWER),
    "/v1/responses": (respond, ANSWER),
    "/v1/messages": (create_message, ANSWER | ANTHROPIC_REFUSALS),
    "/v1/messages/count_tokens": (count_tokens, ANTHROPIC_REFUSALS),
    "/tokenize": (tokenize, {}),
    "/detokenize": (detokenize, {}),
}
"""Those that take a body, each with its endpoint, and the answers besides the usual refusals."""


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The ASGI application over an engine, which `app.state.service` owns."""
    service = Service(llm, settings)
    app = FastAPI(
        title="peagle",
        summary="An OpenAI-compatible endpoint that speculates.",
        version=version("peagle"),
        docs_url=None,
        redoc_url=None,
        responses=REFUSALS,
        root_path=settings.root_path,
    )
    app.state.service = service
    register_errors(app)
    _add_state(app, service)
    app.router.route_class = BodyRoute  # of those that follow
    for path, (endpoint, answers) in ROUTES.items():
        app.post(path, responses=answers, response_model=None)(endpoint)
    app.add_middleware(HeadRequests)
    app.add_middleware(Authentication, keys=settings.api_keys)
    app.add_middleware(SizeLimits, body=settings.limits.body_bytes)
    app.add_middleware(AccessLog)
    if settings.allowed_origins:  # outermost, so that pages can read every refusal
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
            allow_private_network=True,
        )
    return app


def _add_state(app: FastAPI, service: Service) -> None:
    page = files("peagle.server").joinpath("page.html").read_text()

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def playground() -> str:
        return page

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model, under each of its names."""
        return {"object": "list", "data": [_card(service, n) for n in service.settings.model_names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model under one of its names."""
        service.check_model(name)
        return _card(service, name)

    @app.get("/health")
    @app.get("/ready")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> JSONResponse:
        """200 while requests are taken and the engine steps, or could; 503 otherwise."""
        return JSONResponse({}, 200 if service.ready else 503)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Sequences that wait or run."""
        return {"server_load": service.admitted}

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """The package's version."""
        return {"version": app.version}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus's text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "peagle",
        "max_model_len": service.llm.engine.max_length,
        "num_speculative_tokens": service.llm.k,
    }
