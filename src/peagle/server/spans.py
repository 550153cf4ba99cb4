"""OpenTelemetry spans of answers, under vLLM's names; needs the extra `otel`."""

import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from peagle.completion import Completion
from peagle.live_request import Prepared

SPAN = "llm_request"
ASKED, IN_MODEL = ("max_tokens", "temperature", "top_p"), ("prefill", "decode", "inference")
"""Parameters, and parts of the time, that a span tells."""


class RequestSpans:
    """Sends a span for each finished sequence, without its text, from a thread of its own."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        """endpoint: where OTLP's protobuf is posted to."""
        provider = TracerProvider(resource=Resource.create({"service.name": "peagle"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer, self._model = provider.get_tracer("peagle.server"), model_name

    def tell(self, request: Prepared, done: Completion, n: int, origin: Mapping[str, str]) -> None:
        """Make the span of a sequence that has just ended.

        n: sequences of its prompt. origin: the HTTP request's headers of W3C's trace context, and
        its id as `x-request-id`.
        """
        params, took = request.params, done.seconds
        elapsed = took["queue"] + took["inference"]
        each = {
            "request.id": origin.get("x-request-id", ""),
            "request.n": n,
            "request.seed": done.seed,
            **{f"request.{name}": getattr(params, name) for name in ASKED},
            "response.model": self._model,
            "response.finish_reasons": [done.finish_reason],
            "usage.prompt_tokens": len(done.prompt_token_ids),
            "usage.completion_tokens": len(done.token_ids),
            "latency.e2e": elapsed,
            "latency.time_in_queue": took["queue"],
            "latency.time_to_first_token": took["queue"] + took["prefill"],
            **{f"latency.time_in_model_{part}": took[part] for part in IN_MODEL},
        }
        parent, end = TraceContextTextMapPropagator().extract(origin), time.time_ns()
        attributes = {f"gen_ai.{name}": value for name, value in each.items()}
        began = end - int(1e9 * elapsed)
        span = self._tracer.start_span(SPAN, parent, SpanKind.SERVER, attributes, start_time=began)
        span.end(end)
