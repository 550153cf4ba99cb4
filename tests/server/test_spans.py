"""Spans of answers, as an exporter in memory gets them."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Running, load, start
from test_robustness import ask

from peagle.server.settings import ServerSettings

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from peagle.server import spans

ENDPOINT = "http://127.0.0.1:1/v1/traces"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OF_VLLM = {
    "gen_ai." + name
    for name in (
        *("request.id", "request.n", "request.max_tokens", "request.temperature", "request.top_p"),
        *("usage.prompt_tokens", "usage.completion_tokens", "latency.time_in_queue"),
        *("latency.time_to_first_token", "latency.e2e", "latency.time_in_model_prefill"),
        *("latency.time_in_model_decode", "latency.time_in_model_inference"),
    )
}
"""What a span of vLLM 0.33 has."""


@pytest.fixture(scope="module")
def sent() -> Any:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(sent: Any) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "OTLPSpanExporter", lambda endpoint: {ENDPOINT: sent}[endpoint])
        patch.setattr(spans, "BatchSpanProcessor", SimpleSpanProcessor)
        yield from start(ServerSettings(model_names=("demo",), otlp_traces_endpoint=ENDPOINT), load)


@pytest.mark.parametrize("stream", [False, True])
def test_each_sequence_has_a_span_in_its_clients_trace(traced: Running, sent: Any, stream: bool):
    sent.clear()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    body = {"prompt": "def secret():", "max_tokens": 7, "ignore_eos": True, "n": 2, "seed": 8}
    assert ask(traced, "/v1/completions", body | {"stream": stream}, **headers)[0] == 200
    first, second = sent.get_finished_spans()
    for one in (first, second):
        assert (one.name, one.kind.name) == ("llm_request", "SERVER")
        assert f"{one.context.trace_id:032x}" == TRACE
        assert f"{one.parent.span_id:016x}" == PARENT
        told = dict(one.attributes)
        assert told.keys() >= OF_VLLM
        assert told["gen_ai.request.id"] == "mine"
        assert (told["gen_ai.request.n"], told["gen_ai.usage.completion_tokens"]) == (2, 7)
        assert told["gen_ai.response.finish_reasons"] == ("length",)
        assert "secret" not in str(told)
        queued, e2e = told["gen_ai.latency.time_in_queue"], told["gen_ai.latency.e2e"]
        assert 0 <= queued < told["gen_ai.latency.time_to_first_token"] <= e2e
        assert (one.end_time - one.start_time) / 1e9 == pytest.approx(e2e, abs=1e-6)
    assert {one.attributes["gen_ai.request.seed"] for one in (first, second)} == {8, 9}


def test_without_a_trace_of_its_client_a_span_begins_one(traced: Running, sent: Any):
    sent.clear()
    assert ask(traced, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    [span] = sent.get_finished_spans()
    assert span.parent is None
    assert span.attributes["gen_ai.request.id"]


def test_nothing_of_it_is_imported_unasked():
    code = "import sys, peagle.server.run; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
