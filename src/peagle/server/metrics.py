"""Prometheus metrics, under vLLM's names where vLLM has them."""

import bisect
import itertools
import math
import re
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

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
from peagle.files import read_yaml
from peagle.live_request import Prepared
from peagle.server.siblings import Siblings
from peagle.speculation import DraftTotals

disable_created_metrics()
TABLE = read_yaml(Path(__file__).with_suffix(".yaml"))
FAST_SECONDS: Sequence[float] = TABLE["bounds"]["short_seconds"]
LABELS = ("model_name", "engine")
"""The labels of every series, as in vLLM; others' dashboards sum by them."""
SORTED = re.compile(rb'^([\w:]+\{(?:\w+="[^"]*",)*?)(engine="\d+"),(.*)\} ', re.MULTILINE)
"""A sample as prometheus_client writes it, labels in the order of their names."""
STOPS: tuple[Stopped, ...] = get_args(Stopped)
"""Why nothing is drafted."""


class Metrics(Collector):
    """One server's counters; the state of its engines is read at each scrape.

    drafts: of each engine. Each series begins at 0 with the server: to Prometheus one that begins
    at 1 has not grown.
    """

    def __init__(
        self, model_name: str, engine: EngineClient, drafts: Sequence[DraftTotals]
    ) -> None:
        registry = CollectorRegistry()
        each = [(model_name, str(index)) for index, _ in enumerate(drafts)]
        self.engine, self.drafts, self._registry = engine, drafts, registry
        self.siblings = Siblings()
        """Processes whose counts are added."""
        self._series: dict[tuple[str | int, ...], Any] = {}
        """Each by its name, its engine's index, and the value of its own label."""
        for name, (text, label, values) in TABLE["counters"].items():
            counter = Counter(name, text, (*LABELS, label) if label else LABELS, registry=registry)
            every = zip(values) if label else [()]
            for (index, labels), further in itertools.product(enumerate(each), every):
                self._series[name, index, *further] = counter.labels(*labels, *further)
        for name, kind in TABLE["histograms"].items():
            bounds = TABLE["bounds"][kind]
            histogram = Histogram(name, _about(name), LABELS, registry=registry, buckets=bounds)
            for index, labels in enumerate(each):
                self._series[name, index] = histogram.labels(*labels)
        self.engines = [_StateCollector(self, *one) for one in enumerate(each)]
        """What is counted for each engine."""
        registry.register(_Merged(self.engines))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._seen = self._counts()

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        # order means nothing to Prometheus; to readers and grep what tells series apart is first
        return SORTED.sub(rb"\1\3,\2} ", generate_latest(self))

    def collect(self) -> Iterator[Metric]:
        """What all processes have counted, and what this one sees."""
        metrics = self.tell()
        sums = map(sum, zip(*self.siblings.counts, strict=True))
        for metric in metrics:
            if _is_counted(metric):
                metric.samples = [one._replace(value=next(sums)) for one in metric.samples]
            yield metric

    def tell(self) -> Sequence[Metric]:
        """Let other processes know what this one has counted; returns all that it sees."""
        metrics = [*self._registry.collect()]
        values = [one.value for metric in metrics if _is_counted(metric) for one in metric.samples]
        self.siblings.counts[self.siblings.index][: len(values)] = memoryview(array("d", values))
        return metrics

    def line(self) -> str | None:
        """The figures since the last call, for the log; None where there was no traffic."""
        before, self._seen = self._seen, self._counts()
        seconds, tokens, cycles, drafts, accepted, queries, hits = (
            now - then for now, then in zip(self._seen, before, strict=True)
        )
        found = max(hits, 0) / max(queries, hits, 1)  # an engine that began again counts from 0
        stats = self.engine.stats
        if not tokens and not stats.running and not stats.waiting:
            return None
        return (
            f"{stats.running} running, {stats.waiting} waiting, {tokens / seconds:.1f} tokens/s, "
            f"AL {1 + accepted / max(drafts, 1):.2f} in {drafts} of {cycles} cycles, "
            f"KV cache {stats.kv_usage:.0%} used, {found:.0%} of prompt tokens cached"
        )

    def watch(self, request: Prepared, choices: int | None) -> "Watch":
        """Begin to count one sequence. choices: of its prompt, for the first of them; else None."""
        self.observe("vllm:request_params_max_tokens", request.params.max_tokens)
        if choices is not None:
            self.observe("vllm:request_params_n", choices)
        return Watch(self, len(request.tokens) if choices is not None else 0)

    def count(self, name: str, amount: float, *further: str, replica: int = 0) -> None:
        """Add to a counter of an engine. further: the value of its own label."""
        self._series[name, replica, *further].inc(amount)

    def observe(self, name: str, value: float, replica: int = 0) -> None:
        """Add a value to a histogram of an engine."""
        self._series[name, replica].observe(value)

    def since_audit(self, replica: int) -> float:
        """Seconds since the last audit of an engine ended, or since there could be any."""
        return time.monotonic() - max(self.siblings.audited[replica], self.siblings.began)

    def _counts(self) -> tuple[float, ...]:
        """What `line` tells the growth of."""
        stats, drafts = self.engine.stats, DraftTotals.pooled(self.drafts)
        tokens = sum(engine.tokens for engine in self.engines)
        did = drafts.lengths.total(), drafts.cycles, drafts.accepted
        return time.monotonic(), tokens, *did, stats.prefix_queries, stats.prefix_hits


class Watch:
    """Counts one sequence from its arrival to its end.

    prompt_tokens: those that no other sequence counts.
    """

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics, self._prompt_tokens = metrics, prompt_tokens
        self._arrived = self._last = time.perf_counter()
        self._begun = self._closed = False
        self._replica = 0
        """The engine that runs it, once its first chunk has told."""

    def add(self, chunk: Chunk, now: float) -> None:
        """Count a chunk that came at the time `now`, and the sequence once it is finished."""
        seconds, self._last, self._replica = now - self._last, now, chunk.replica
        engine = self._metrics.engines[self._replica]
        if self._begun:
            engine.between(seconds)
        else:
            self._observe("vllm:time_to_first_token_seconds", seconds)
            self._count("vllm:prompt_tokens", self._prompt_tokens)
        self._begun = True
        engine.tokens += len(chunk.token_ids)
        if chunk.completion is not None:
            self._finish(chunk.completion)
            self._end(chunk.completion.finish_reason, now)

    def close(self) -> None:
        """Count the sequence as cancelled unless it is finished."""
        if not self._closed:
            self._end("abort", time.perf_counter())

    def _finish(self, done: Completion) -> None:
        """Count how long a finished sequence was, and how long it took."""
        count, took = len(done.token_ids), done.seconds
        self._count("vllm:prompt_tokens_cached", done.cached_tokens)
        values = {
            **{f"vllm:request_{name}_time_seconds": value for name, value in took.items()},
            "vllm:request_prompt_tokens": len(done.prompt_token_ids),
            "vllm:request_generation_tokens": count,
        }
        if count > 1:
            values["vllm:request_time_per_output_token_seconds"] = took["decode"] / (count - 1)
        for name, value in values.items():
            self._observe(name, value)

    def _end(self, reason: str, now: float) -> None:
        self._closed = True
        self._count("vllm:request_success", 1, reason)
        self._observe("vllm:e2e_request_latency_seconds", now - self._arrived)

    def _count(self, name: str, amount: float, *further: str) -> None:
        self._metrics.count(name, amount, *further, replica=self._replica)

    def _observe(self, name: str, value: float) -> None:
        self._metrics.observe(name, value, self._replica)


class _Merged(Collector):
    """The collectors of several engines: each metric once, with the samples of all of them."""

    def __init__(self, each: "Sequence[_StateCollector]") -> None:
        self._each = each

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for metric in itertools.chain.from_iterable(one.collect() for one in self._each):
            if (known := merged.setdefault(metric.name, metric)) is not metric:
                known.samples += metric.samples
        return merged.values()


class _StateCollector:
    """What an engine and its drafts have come to at the moment of the scrape, and what every chunk
    counts, where a lock for each would cost more than the count.
    """

    def __init__(self, metrics: Metrics, index: int, labels: tuple[str, str]) -> None:
        self._metrics, self._index, self._labels = metrics, index, labels
        self._drafts = metrics.drafts[index]
        self._process = ProcessCollector("peagle_engine", lambda: self._engine.pid, registry=None)
        self.tokens = 0
        """Tokens generated."""
        self._seconds = 0.0
        self._counts = [0] * (len(FAST_SECONDS) + 1)
        """Chunks by the first bound that is not below the time since the one before."""

    @property
    def _engine(self) -> EngineClient:
        """The engine, which may be another one in its place by the next scrape."""
        return self._metrics.engine.replicas[self._index]

    def between(self, seconds: float) -> None:
        """Count the time between two chunks."""
        self._seconds += seconds
        self._counts[bisect.bisect_left(FAST_SECONDS, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        yield self._intervals()
        yield from self._of_its_process()
        yield from self._values()
        yield from self._labelled()
        yield from self._facts()

    def _intervals(self) -> Metric:
        name = "vllm:inter_token_latency_seconds"
        between = HistogramMetricFamily(name, _about(name), labels=LABELS)
        bounds = [floatToGoString(bound) for bound in (*FAST_SECONDS, math.inf)]
        counts = itertools.accumulate(self._counts)
        between.add_metric(self._labels, [*zip(bounds, counts, strict=True)], self._seconds)
        return between

    def _of_its_process(self) -> Iterator[Metric]:
        for metric in self._process.collect():
            labels = dict(zip(LABELS, self._labels, strict=True))
            metric.samples = [one._replace(labels=labels) for one in metric.samples]
            yield metric

    def _values(self) -> Iterator[Metric]:
        """Those of one sample."""
        engine, did, idle = self._engine, self._drafts, self._metrics.since_audit(self._index)
        stats, gauge, counter = engine.stats, GaugeMetricFamily, CounterMetricFamily
        for kind, name, value in (
            (gauge, "vllm:num_requests_running", stats.running),
            (gauge, "vllm:num_requests_waiting", stats.waiting),
            (gauge, "vllm:kv_cache_usage_perc", stats.kv_usage),
            (gauge, "peagle:engine_responds", engine.responds),
            (gauge, "peagle:step_age_seconds", engine.step_age),
            (gauge, "peagle:audit_seconds_since_last", idle),
            (counter, "vllm:prefix_cache_queries", stats.prefix_queries),
            (counter, "vllm:prefix_cache_hits", stats.prefix_hits),
            (counter, "vllm:num_preemptions", stats.preemptions),
            (counter, "vllm:generation_tokens", self.tokens),
            (counter, "vllm:spec_decode_num_drafts", did.cycles),
            (counter, "vllm:spec_decode_num_draft_tokens", did.drafted),
            (counter, "vllm:spec_decode_num_accepted_tokens", did.accepted),
            (counter, "peagle:cycles_without_drafts", did.pauses),
        ):
            yield self._family(kind, name, [((), value)])

    def _labelled(self) -> Iterator[Metric]:
        """Those of a sample for each value of a label."""
        engine, did, counter = self._engine, self._drafts, CounterMetricFamily
        stopped = [((why,), float(why == engine.stats.drafting_stopped)) for why in STOPS]
        yield self._family(GaugeMetricFamily, "peagle:drafting_stopped", stopped, "reason")
        accepted = [((str(place),), n) for place, n in enumerate(did.accepted_per_position)]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield self._family(counter, name, accepted, "position")
        lengths = [((str(k),), did.lengths[k]) for k in range(engine.k + 1)]
        yield self._family(counter, "peagle:cycles", lengths, "length")

    def _facts(self) -> Iterator[Metric]:
        """What never changes, in labels."""
        facts = self._engine.facts
        cache = {"block_size": facts.block_size, "num_gpu_blocks": facts.num_blocks}
        build = {
            "version": version("peagle"),
            "torch": version("torch"),
            "device": "cuda" if facts.runs_ahead else "cpu",
            "drafter": "none" if facts.drafter is None else facts.drafter.kind.name,
            "num_speculative_tokens": facts.k,
        }
        for name, told in (("vllm:cache_config_info", cache), ("peagle:build_info", build)):
            values = tuple(map(str, told.values()))
            yield self._family(GaugeMetricFamily, name, [(values, 1.0)], *told)

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        samples: Iterable[tuple[tuple[str, ...], float]],
        *further: str,
    ) -> Metric:
        """A metric by the values of its further labels, which come after those of every series."""
        family = kind(name, _about(name), labels=(*LABELS, *further))
        for values, sample in samples:
            family.add_metric((*self._labels, *values), sample)
        return family


def _is_counted(metric: Metric) -> bool:
    return metric.type in ("counter", "histogram") and metric.name not in TABLE["of_engines"]


def _about(name: str) -> str:
    """What a metric is, which most names say."""
    return TABLE["texts"].get(name) or name.partition(":")[2].replace("_", " ").capitalize() + "."
