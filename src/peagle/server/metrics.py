"""Prometheus metrics, under vLLM's names where vLLM has them."""

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from peagle.completion import Chunk, Completion
from peagle.engine.draft_length import Stopped
from peagle.engine.engine import EngineStats

disable_created_metrics()
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80)
FAST_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
LABEL = "model_name"
ENDINGS = ("stop", "length", "abort", "error")
"""Why a sequence ends."""
REFUSALS = ("queue", "draining", "engine")
"""Why a request is refused: too many wait, the server shuts down, the engine failed."""


class Metrics:
    """One server's counters; the engine's own state is read at each scrape.

    Each series begins at 0 with the server: to Prometheus one that begins at 1 has not grown.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        k: int,
        step_age: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """k: most tokens that a cycle drafts; step_age: seconds for which the present step runs."""
        self._model, self._registry = model_name, CollectorRegistry()
        self._registry.register(_StatsCollector(model_name, stats, step_age))
        self._prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens of finished requests."
        )
        self._finished = self._counter(
            "vllm:request_success", "Requests ended.", "finished_reason", ENDINGS
        )
        self._refused = self._counter(
            "peagle:requests_rejected", "Requests refused.", "reason", REFUSALS
        )
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Verifications of drafts.")
        self._pauses = self._counter("peagle:cycles_without_drafts", "Cycles that drafted nothing.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.")
        self._accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted.", "position", range(k)
        )
        self._looked_up = self._counter(
            "peagle:lookup_draft_tokens", "Of the drafts, those found in the request's own text."
        )
        self._found = self._counter("peagle:lookup_accepted_tokens", "Of these, those accepted.")
        self._first = self._histogram("vllm:time_to_first_token_seconds", SECONDS)
        self._chunks = _ChunkCollector(model_name)
        self._registry.register(self._chunks)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", SECONDS)
        self._queued = self._histogram("vllm:request_queue_time_seconds", SECONDS)

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry)

    def watch(self, counts_prompt: bool) -> "Watch":
        """Begin to count one sequence; `counts_prompt` is for the first of those with a prompt."""
        return Watch(self, counts_prompt)

    def refused(self, reason: str) -> None:
        """Count a refused request."""
        self._refused.labels(self._model, reason).inc()

    def first_chunk(self, seconds: float) -> None:
        """Count the time to a sequence's first token."""
        self._first.labels(self._model).observe(seconds)

    def next_chunk(self, seconds: float) -> None:
        """Count the time between two chunks of a sequence."""
        self._chunks.between(seconds)

    def tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._chunks.tokens += count

    def ended(self, reason: str, seconds: float) -> None:
        """Count the end of a sequence, finished or cancelled."""
        self._finished.labels(self._model, reason).inc()
        self._whole.labels(self._model).observe(seconds)

    def prompt(self, tokens: int) -> None:
        """Count a finished prompt."""
        self._prompt_tokens.labels(self._model).inc(tokens)

    def finished(self, completion: Completion) -> None:
        """Count what speculation did for a finished sequence."""
        self._queued.labels(self._model).observe(completion.queued)
        did = completion.speculation
        self._drafts.labels(self._model).inc(did.cycles)
        self._pauses.labels(self._model).inc(did.pauses)
        self._drafted.labels(self._model).inc(did.drafted)
        self._accepted.labels(self._model).inc(did.accepted)
        self._looked_up.labels(self._model).inc(did.looked_up)
        self._found.labels(self._model).inc(did.looked_up_accepted)
        for position, count in enumerate(did.accepted_per_position):
            self._accepted_at.labels(self._model, position).inc(count)

    def _counter(
        self, name: str, text: str, label: str | None = None, values: Iterable[object] = ()
    ) -> Counter:
        """A counter, perhaps with a further label of these known values."""
        labels = (LABEL,) if label is None else (LABEL, label)
        counter = Counter(name, text, labels, registry=self._registry)
        for further in [()] if label is None else zip(values):
            counter.labels(self._model, *further)
        return counter

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        registry = self._registry
        histogram = Histogram(name, _about(name), (LABEL,), registry=registry, buckets=buckets)
        histogram.labels(self._model)
        return histogram


class Watch:
    """Counts one sequence from its arrival to its end."""

    def __init__(self, metrics: Metrics, counts_prompt: bool) -> None:
        self._metrics, self._counts_prompt = metrics, counts_prompt
        self._arrived = self._last = time.perf_counter()
        self._chunks = 0
        self._closed = False

    def add(self, chunk: Chunk, now: float) -> None:
        """Count a chunk that came at the time `now`, and the sequence once it is finished."""
        seconds, self._last = now - self._last, now
        if self._chunks:
            self._metrics.next_chunk(seconds)
        else:
            self._metrics.first_chunk(seconds)
        self._chunks += 1
        self._metrics.tokens(len(chunk.token_ids))
        if chunk.completion is not None:
            self._metrics.finished(chunk.completion)
            if self._counts_prompt:
                self._metrics.prompt(len(chunk.completion.prompt_token_ids))
            self._end(chunk.completion.finish_reason, now)

    def close(self) -> None:
        """Count the sequence as cancelled unless it is finished."""
        if not self._closed:
            self._end("abort", time.perf_counter())

    def _end(self, reason: str, now: float) -> None:
        self._closed = True
        self._metrics.ended(reason, now - self._arrived)


class _ChunkCollector(Collector):
    """What every chunk counts, where a lock for each would cost more than the count."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self.tokens = 0
        """Tokens generated."""
        self._seconds = 0.0
        self._counts = [0] * (len(FAST_SECONDS) + 1)
        """Chunks by the first bound that is not below the time since the one before."""

    def between(self, seconds: float) -> None:
        """Count the time between two chunks."""
        self._seconds += seconds
        self._counts[bisect.bisect_left(FAST_SECONDS, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=[LABEL])
        tokens.add_metric([self._model], self.tokens)
        yield tokens
        name = "vllm:inter_token_latency_seconds"
        between = HistogramMetricFamily(name, _about(name), labels=[LABEL])
        bounds = [floatToGoString(bound) for bound in (*FAST_SECONDS, math.inf)]
        counts = itertools.accumulate(self._counts)
        between.add_metric([self._model], [*zip(bounds, counts, strict=True)], self._seconds)
        yield between


def _about(name: str) -> str:
    """What a metric is, by its name."""
    return name.removeprefix("vllm:").replace("_", " ").capitalize() + "."


class _StatsCollector(Collector):
    """The engine's state at the moment of the scrape."""

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats], step_age: Callable[[], float]
    ) -> None:
        self._model, self._stats, self._step_age = model_name, stats, step_age

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "vllm:num_requests_running": stats.running,
            "vllm:num_requests_waiting": stats.waiting,
            "vllm:kv_cache_usage_perc": stats.kv_usage,
            "peagle:step_age_seconds": self._step_age(),
        }
        counters = {
            "vllm:prefix_cache_queries": stats.prefix_queries,
            "vllm:prefix_cache_hits": stats.prefix_hits,
            "vllm:num_preemptions": stats.preemptions,
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, value in values.items():
                family = kind(name, name.partition(":")[2].replace("_", " "), labels=[LABEL])
                family.add_metric([self._model], value)
                yield family
        stopped = GaugeMetricFamily(
            "peagle:drafting_stopped",
            "Whether nothing is drafted, and why.",
            labels=[LABEL, "reason"],
        )
        for reason in get_args(Stopped):
            stopped.add_metric([self._model, reason], float(stats.drafting_stopped == reason))
        yield stopped
