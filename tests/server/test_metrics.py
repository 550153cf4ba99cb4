"""Counters equal the sums over all answers."""

import os
import re
import time
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import K, Running
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from test_robustness import ask

from peagle.engine.engine import EngineFacts, EngineStats
from peagle.server.metrics import Metrics
from peagle.speculation import DraftTotals

REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": 30},
    {"max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 3},
    {"max_tokens": 12, "extra_body": {"speculation": {"num_speculative_tokens": 2}}},
    {"max_tokens": 12, "extra_body": {"speculation": {"num_speculative_tokens": 0}}},
    {"max_tokens": 64, "stop": ["return", ":"]},
]


CONSTANT = ("model_name", "engine", "le")
"""Labels that tell no two samples apart."""
OF_VLLM = {
    "vllm:" + name
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("cache_config_info", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
        *("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "request_success"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
        *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
        *("request_params_n", "request_params_max_tokens"),
    )
}
"""Names in vLLM 0.33 of what others' dashboards, routers and autoscalers read."""


def idle(reason: str | None = None) -> Any:
    """An engine that has done nothing."""
    facts = EngineFacts(9, (), 64, 4, 2, 0, False, None, 16, 100, 1600, 0, 600.0)
    stats = EngineStats(0, 0, 0.0, 0, 0, 0, reason)
    state = {"stats": stats, "responds": False, "step_age": 0.0, "pid": os.getpid()}
    engine = SimpleNamespace(facts=facts, k=2, **state)
    engine.replicas = [engine]
    return engine


def counters(server: Running) -> Counter[str]:
    """Every sample without the model's name, other labels joined to it."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(ask(server, "/metrics", b"", "GET")[2]):
        for sample in family.samples:
            labels = [v for k, v in sorted(sample.labels.items()) if k not in CONSTANT]
            if "le" not in sample.labels:
                found["/".join([sample.name.removeprefix("vllm:"), *labels])] = sample.value
    return found


@pytest.mark.usefixtures("_clean")
def test_counters_equal_the_sums_over_answers(server: Running, client: OpenAI):
    before = counters(server)
    wanted: Counter[str] = Counter()
    for fields in REQUESTS:
        answer = client.completions.create(model="demo", prompt="def area(self):\n", **fields)
        usage, did = answer.usage, answer.usage.model_extra["speculation"]
        wanted["prompt_tokens_total"] += usage.prompt_tokens
        wanted["generation_tokens_total"] += usage.completion_tokens
        wanted["spec_decode_num_drafts_total"] += did["cycles"]
        wanted["spec_decode_num_draft_tokens_total"] += did["drafted"]
        wanted["spec_decode_num_accepted_tokens_total"] += did["accepted"]
        for position, count in enumerate(did["accepted_per_position"]):
            wanted[f"spec_decode_num_accepted_tokens_per_pos_total/{position}"] += count
        for choice in answer.choices:
            wanted[f"request_success_total/{choice.finish_reason}"] += 1
        wanted["time_to_first_token_seconds_count"] += len(answer.choices)
        wanted["e2e_request_latency_seconds_count"] += len(answer.choices)
    after = counters(server)
    assert {name: after[name] - before[name] for name in wanted} == dict(wanted)
    assert wanted[f"spec_decode_num_accepted_tokens_per_pos_total/{K - 1}"] > 0


def test_every_series_is_there_before_it_counts():
    """Of one that begins with 1 Prometheus sees no growth, nor sends an alert."""
    metrics = Metrics("demo", idle(), [DraftTotals([0, 0])])
    families = [
        family
        for family in text_string_to_metric_families(metrics.text().decode())
        if family.name.startswith(("vllm:", "peagle:")) and not family.name.endswith("_info")
    ]
    assert [family.name for family in families if not family.samples] == []
    counted = [family for family in families if not family.name.endswith("since_last")]
    assert {sample.value for family in counted for sample in family.samples} == {0}
    labels: dict[str, set[str]] = defaultdict(set)
    for sample in (sample for family in families for sample in family.samples):
        labels[sample.name] |= {v for k, v in sample.labels.items() if k not in CONSTANT}
    assert {name: values for name, values in labels.items() if values} == {
        "vllm:request_success_total": {"stop", "length", "abort", "error", "repetition"},
        "peagle:audited_requests_total": {"equal", "near_tie", "different", "skipped", "dropped"},
        "peagle:requests_rejected_total": {"queue", "draining", "engine"},
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": {"0", "1"},
        "peagle:drafting_stopped": {"wrong drafts", "slower cycles"},
        "peagle:cycles_total": {"0", "1", "2"},
    }
    seen = metrics.text()
    metrics.count("peagle:requests_rejected", 1, "queue")
    metrics.count("vllm:request_success", 1, "abort")
    assert len(metrics.text().splitlines()) == len(seen.splitlines())


@pytest.mark.parametrize("name", ["demo", 'a "quoted} {name, engine="7",'])
def test_what_tells_series_apart_comes_before_the_engine(name: str):
    """Others search the page by the label of vLLM's that differs."""
    text = Metrics(name, idle(), [DraftTotals([0, 0])]).text().decode()
    assert 'vllm:request_success_total{finished_reason="abort",model_name="' in text
    labels = [line for line in text.splitlines() if line.startswith("vllm:request_success_total")]
    assert len(labels) == 5
    assert all(line.endswith(',engine="0"} 0.0') for line in labels)
    samples = [one for f in text_string_to_metric_families(text) for one in f.samples]
    assert {one.labels["model_name"] for one in samples if "engine" in one.labels} == {name}


@pytest.mark.parametrize("reason", ["wrong drafts", "slower cycles", None])
def test_it_says_why_nothing_is_drafted(reason: str | None):
    metrics = Metrics("demo", idle(reason), [DraftTotals([0, 0])])
    families = text_string_to_metric_families(metrics.text().decode())
    [family] = (f for f in families if f.name == "peagle:drafting_stopped")
    told = {sample.labels["reason"]: sample.value for sample in family.samples}
    assert told == {each: each == reason for each in ("wrong drafts", "slower cycles")}


def test_an_idle_server_says_so(server: Running):
    server.wait_until_idle()
    found = counters(server)
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert found["kv_cache_usage_perc"] == 0


def test_prefix_cache_hits_show_up(server: Running, client: OpenAI):
    prompt = "import os\n" * 40
    before = counters(server)
    for _ in range(2):
        last = client.completions.create(model="demo", prompt=prompt, max_tokens=2)
    after = counters(server)
    hits = after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"]
    assert hits == last.usage.prompt_tokens_details.cached_tokens > 100


def test_what_others_read_has_vllm_s_names_and_labels(server: Running):
    families = text_string_to_metric_families(ask(server, "/metrics", b"", "GET")[2])
    found = {family.name: family.samples for family in families}
    assert found.keys() >= OF_VLLM
    assert all({"model_name", "engine"} <= one.labels.keys() for n in OF_VLLM for one in found[n])
    [cache] = found["vllm:cache_config_info"]
    facts = server.service.llm.engine.facts
    assert cache.labels["block_size"] == str(facts.block_size)
    assert cache.labels["num_gpu_blocks"] == str(facts.num_blocks)
    for process in ("process", "peagle_engine_process"):
        assert found[f"{process}_resident_memory_bytes"][0].value > 1 << 20


def test_requests_that_are_left_are_counted_as_far_as_they_came(server: Running, client: OpenAI):
    """Their prompts, their tokens and their drafts."""
    before = counters(server)
    for _ in range(10):
        stream = client.completions.create(
            model="demo",
            prompt="def area(self):\n",
            max_tokens=1900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    server.wait_until_idle()
    after = counters(server)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["request_success_total/abort"] == 10
    assert grown["prompt_tokens_total"] > 10
    cycles = sum(grown[f"peagle:cycles_total/{length}"] for length in range(K + 1))
    drafts = grown["spec_decode_num_drafts_total"]
    assert 0 < drafts <= cycles
    accepted = grown["spec_decode_num_accepted_tokens_total"]
    assert grown["generation_tokens_total"] <= cycles + accepted + 10


def test_the_log_has_a_line_of_figures_of_traffic(server: Running, client: OpenAI):
    """And none without."""
    metrics = server.service.metrics
    server.wait_until_idle()
    metrics.line()
    assert metrics.line() is None
    client.completions.create(model="demo", prompt="def area(self):\n", max_tokens=30)
    end = time.monotonic() + 120
    while (line := metrics.line()) is None:
        assert time.monotonic() < end
    assert re.fullmatch(
        r"\d running, \d waiting, [\d.]+ tokens/s, AL [\d.]+ in \d+ of \d+ cycles, "
        r"KV cache \d+% used, \d+% of prompt tokens cached",
        line,
    )


def test_the_line_counts_anew_what_an_engine_that_began_again_found():
    idle = EngineStats(1, 0, 0.0, 0, prefix_queries=5000, prefix_hits=3000)
    engine: Any = SimpleNamespace(stats=idle)
    metrics = Metrics("demo", engine, [DraftTotals([])])
    engine.stats = replace(idle, prefix_queries=40, prefix_hits=10)
    assert metrics.line().endswith(" 0% of prompt tokens cached")
