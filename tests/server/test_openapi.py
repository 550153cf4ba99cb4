"""Requests generated from the server's own OpenAPI document: never a server error."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from conftest import KEY, NAME, Running, start
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from sweeps import at_night

from peagle import LLM, EngineConfig
from peagle.pair import bundled
from peagle.server.settings import ServerSettings
from peagle.server.tool_body import NamedTool

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
HEADERS = {"Authorization": f"Bearer {KEY}"}
BODIES = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/invocations", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
]
OTHERS = [
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/health", "GET"),
    ("/ready", "GET"),
    ("/load", "GET"),
    ("/ping", "GET"),
    ("/ping", "POST"),
    ("/version", "GET"),
    ("/metrics", "GET"),
]
FITTING, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CASES = [(*place, FITTING) for place in BODIES + OTHERS] + [(*place, WRONG) for place in BODIES]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One of a short context, which answers without a limit fill."""

    def load() -> LLM:
        config = EngineConfig(
            dtype="float32", max_num_seqs=4, kv_cache_memory=1 << 26, max_model_len=256
        )
        return LLM(bundled("target"), config=config)

    yield from start(ServerSettings(model_names=(NAME,), api_keys=(KEY,)), load)


@pytest.fixture(scope="module")
def document(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=HEADERS)


def test_every_route_is_in_the_list(document: Any):
    found = {(o.ok().path, o.ok().method.upper()) for o in document.get_all_operations()}
    assert found == {*BODIES, *OTHERS}


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
@pytest.mark.parametrize("examples", [3, *at_night([30])])
def test_no_request_is_a_server_error(
    document: Any, server: Running, path: str, method: str, mode: GenerationMode, examples: int
):
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(headers=HEADERS, checks=CHECKS, timeout=120)

    check()
    server.wait_until_idle()


def test_a_named_tool_is_described_as_openai_does():
    assert NamedTool.model_json_schema()["required"] == ["type", "function"]
