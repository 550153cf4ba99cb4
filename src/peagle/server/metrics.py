"""Prometheus metrics, under vLLM's names where vLLM has them."""

import bisect
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
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
from peagle.engine_client.client import EngineClient
from peagle.live_request import Prepared
from peagle.speculation import DraftTotals

disable_created_metrics()
SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80),
    *(160, 320, 640, 1280, 2560, 7680),
)
FAST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5),
    *(10, 20, 40, 80),
)
COUNTS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
CHOICES = (1, 2, 5, 10, 20)
LABELS = ("model_name", "engine")
"""Of every series, as in vLLM; others' dashboards sum by them."""
ENGINE = "0"
ENDINGS = ("stop", "length", "abort", "error")
"""Why a sequence ends."""
REFUSALS = ("queue", "draining", "engine")
"""Why a request is refused: too many wait, the server shuts down, the engine failed."""


class Metrics:
    """One server's counters; the engine's own state is read at each scrape.

    Each series begins at 0 with the server: to Prometheus one that begins at 1 has not grown.
    """

    def __init__(self, model_name: str, engine: EngineClient, drafts: DraftTotals) -> None:
        self._labels, self._registry = (model_name, ENGINE), CollectorRegistry()
        self._engine, self._drafts = engine, drafts
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens computed.")
        self._cached = self._counter("vllm:prompt_tokens_cached", "Of these, those found cached.")
        self._finished = self._counter(
            "vllm:request_success", "Requests ended.", "finished_reason", ENDINGS
        )
        self._refused = self._counter(
            "peagle:requests_rejected", "Requests refused.", "reason", REFUSALS
        )
        self._first = self._histogram("vllm:time_to_first_token_seconds", SECONDS)
        self._chunks = _ChunkCollector(self._labels)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", SECONDS)
        self._queued = self._histogram("vllm:request_queue_time_seconds", SECONDS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", SECONDS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", SECONDS)
        self._ran = self._histogram("vllm:request_inference_time_seconds", SECONDS)
        self._each = self._histogram("vllm:request_time_per_output_token_seconds", FAST_SECONDS)
        self._prompt_length = self._histogram("vllm:request_prompt_tokens", COUNTS)
        self._length = self._histogram("vllm:request_generation_tokens", COUNTS)
        self._most = self._histogram("vllm:request_params_max_tokens", COUNTS)
        self._choices = self._histogram("vllm:request_params_n", CHOICES)
        self._registry.register(_EngineCollector(self._labels, engine))
        self._registry.register(_DraftCollector(self._labels, drafts, engine.k))
        self._registry.register(self._chunks)
        ProcessCollector(registry=self._registry)
        ProcessCollector("peagle_engine", lambda: engine.pid, registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._seen = self._counts()

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry)

    def line(self) -> str | None:
        """The figures since the last call, for the log; None where there was no traffic."""
        before, self._seen = self._seen, self._counts()
        seconds, tokens, cycles, drafts, accepted, queries, hits = (
            now - then for now, then in zip(self._seen, before, strict=True)
        )
        stats = self._engine.stats
        if not tokens and not stats.running and not stats.waiting:
            return None
        return (
            f"{stats.running} running, {stats.waiting} waiting, {tokens / seconds:.1f} tokens/s, "
            f"AL {1 + accepted / max(drafts, 1):.2f} in {drafts} of {cycles} cycles, "
            f"KV cache {stats.kv_usage:.0%} used, {hits / max(queries, 1):.0%} of prompts found"
        )

    def watch(self, request: Prepared, choices: int | None) -> "Watch":
        """Begin to count one sequence. choices: of its prompt, for the first of them; else None."""
        self._most.labels(*self._labels).observe(request.params.max_tokens)
        if choices is not None:
            self._choices.labels(*self._labels).observe(choices)
        return Watch(self, len(request.tokens), choices is not None)

    def refused(self, reason: str) -> None:
        """Count a refused request."""
        self._refused.labels(*self._labels, reason).inc()

    def first_chunk(self, seconds: float, prompt_tokens: int) -> None:
        """Count the time to a sequence's first token, and its prompt unless another has."""
        self._first.labels(*self._labels).observe(seconds)
        self._prompt_tokens.labels(*self._labels).inc(prompt_tokens)

    def next_chunk(self, seconds: float) -> None:
        """Count the time between two chunks of a sequence."""
        self._chunks.between(seconds)

    def tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._chunks.tokens += count

    def ended(self, reason: str, seconds: float) -> None:
        """Count the end of a sequence, finished or cancelled."""
        self._finished.labels(*self._labels, reason).inc()
        self._whole.labels(*self._labels).observe(seconds)

    def finished(self, completion: Completion) -> None:
        """Count how long a finished sequence was, and how long it took."""
        count, times = len(completion.token_ids), completion.token_times or (completion.queued,)
        self._cached.labels(*self._labels).inc(completion.cached_tokens)
        values = {
            self._queued: completion.queued,
            self._prefill: times[0] - completion.queued,
            self._decode: times[-1] - times[0],
            self._ran: times[-1] - completion.queued,
            self._prompt_length: len(completion.prompt_token_ids),
            self._length: count,
        }
        if count > 1:
            values[self._each] = (times[-1] - times[0]) / (count - 1)
        for histogram, value in values.items():
            histogram.labels(*self._labels).observe(value)

    def _counts(self) -> tuple[float, ...]:
        """What `line` tells the growth of."""
        stats, drafts = self._engine.stats, self._drafts
        cache = stats.prefix_queries, stats.prefix_hits
        did = drafts.cycles.total(), drafts.drafts, drafts.accepted
        return time.monotonic(), self._chunks.tokens, *did, *cache

    def _counter(
        self, name: str, text: str, label: str | None = None, values: Iterable[object] = ()
    ) -> Counter:
        """A counter, perhaps with a further label of these known values."""
        labels = LABELS if label is None else (*LABELS, label)
        counter = Counter(name, text, labels, registry=self._registry)
        for further in [()] if label is None else zip(values):
            counter.labels(*self._labels, *further)
        return counter

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        registry = self._registry
        histogram = Histogram(name, _about(name), LABELS, registry=registry, buckets=buckets)
        histogram.labels(*self._labels)
        return histogram


class Watch:
    """Counts one sequence from its arrival to its end."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, counts_prompt: bool) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens if counts_prompt else 0
        self._arrived = self._last = time.perf_counter()
        self._chunks = 0
        self._closed = False

    def add(self, chunk: Chunk, now: float) -> None:
        """Count a chunk that came at the time `now`, and the sequence once it is finished."""
        seconds, self._last = now - self._last, now
        if self._chunks:
            self._metrics.next_chunk(seconds)
        else:
            self._metrics.first_chunk(seconds, self._prompt_tokens)
        self._chunks += 1
        self._metrics.tokens(len(chunk.token_ids))
        if chunk.completion is not None:
            self._metrics.finished(chunk.completion)
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

    def __init__(self, labels: tuple[str, str]) -> None:
        self._labels = labels
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
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=LABELS)
        tokens.add_metric(self._labels, self.tokens)
        yield tokens
        name = "vllm:inter_token_latency_seconds"
        between = HistogramMetricFamily(name, _about(name), labels=LABELS)
        bounds = [floatToGoString(bound) for bound in (*FAST_SECONDS, math.inf)]
        counts = itertools.accumulate(self._counts)
        between.add_metric(self._labels, [*zip(bounds, counts, strict=True)], self._seconds)
        yield between


class _EngineCollector(Collector):
    """The engine's state at the moment of the scrape."""

    def __init__(self, labels: tuple[str, str], engine: EngineClient) -> None:
        self._labels, self._engine = labels, engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        gauges = {
            "vllm:num_requests_running": stats.running,
            "vllm:num_requests_waiting": stats.waiting,
            "vllm:kv_cache_usage_perc": stats.kv_usage,
            "peagle:step_age_seconds": self._engine.step_age,
        }
        counters = {
            "vllm:prefix_cache_queries": stats.prefix_queries,
            "vllm:prefix_cache_hits": stats.prefix_hits,
            "vllm:num_preemptions": stats.preemptions,
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, value in values.items():
                family = kind(name, _about(name), labels=LABELS)
                family.add_metric(self._labels, value)
                yield family
        stopped = GaugeMetricFamily(
            "peagle:drafting_stopped",
            "Whether nothing is drafted, and why.",
            labels=(*LABELS, "reason"),
        )
        for reason in get_args(Stopped):
            value = float(stats.drafting_stopped == reason)
            stopped.add_metric((*self._labels, reason), value)
        yield stopped
        yield from self._facts()

    def _facts(self) -> Iterator[Metric]:
        """What never changes, in labels."""
        facts = self._engine.facts
        cache = {"block_size": facts.block_size, "num_gpu_blocks": facts.num_blocks}
        drafter = "none" if facts.drafter is None else facts.drafter.kind.name
        build = {
            "version": version("peagle"),
            "torch": version("torch"),
            "device": "cuda" if facts.runs_ahead else "cpu",
            "drafter": drafter,
            "num_speculative_tokens": facts.k,
        }
        for name, told in (("vllm:cache_config_info", cache), ("peagle:build_info", build)):
            family = GaugeMetricFamily(name, _about(name), labels=(*LABELS, *told))
            family.add_metric((*self._labels, *map(str, told.values())), 1.0)
            yield family


class _DraftCollector(Collector):
    """What speculation has done by the moment of the scrape."""

    def __init__(self, labels: tuple[str, str], drafts: DraftTotals, k: int) -> None:
        self._labels, self._drafts, self._k = labels, drafts, k

    def collect(self) -> Iterator[Metric]:
        did = self._drafts
        for name, text, value in (
            ("vllm:spec_decode_num_drafts", "Verifications of drafts.", did.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", did.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", did.accepted),
            ("peagle:cycles_without_drafts", "Cycles that drafted nothing.", did.cycles[0]),
            ("peagle:lookup_draft_tokens", "Drafts found in the request's text.", did.looked_up),
            ("peagle:lookup_accepted_tokens", "Of these, those right.", did.looked_up_accepted),
        ):
            family = CounterMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted."
        yield self._by("position", name, text, did.accepted_per_position)
        lengths = [did.cycles[length] for length in range(self._k + 1)]
        yield self._by("length", "peagle:cycles", "Cycles by the tokens that they draft.", lengths)

    def _by(self, label: str, name: str, text: str, values: Sequence[int]) -> Metric:
        """A counter for each place in a list."""
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for place, value in enumerate(values):
            family.add_metric((*self._labels, str(place)), value)
        return family


def _about(name: str) -> str:
    """What a metric is, by its name."""
    return name.partition(":")[2].replace("_", " ").capitalize() + "."
