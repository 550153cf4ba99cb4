"""What `deploy/` asks of the server's metrics and pods is there."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tiny_pair import TinyPair, save_pair

from peagle import LLM, AsyncLLM, SpeculativeConfig
from peagle.server.metrics import Metrics

DEPLOY = Path(__file__).parents[1] / "deploy"
FILES = ("kubernetes", "monitoring", "autoscaling", "network-policy")
OF_PROMETHEUS = {"instance", "le"}
"""Labels that are not a sample's own."""


def documents() -> dict[str, Any]:
    """By kind."""
    texts = [(DEPLOY / f"{name}.yaml").read_text() for name in FILES]
    return {one["kind"]: one for text in texts for one in yaml.safe_load_all(text)}


def queries() -> dict[str, str]:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    found = {
        f"dashboard: {panel['title']} {place}": target["expr"]
        for panel in panels
        for place, target in enumerate(panel.get("targets", []))
    }
    known = documents()
    for group in known["PrometheusRule"]["spec"]["groups"]:
        found |= {rule["alert"]: rule["expr"] for rule in group["rules"]}
    for trigger in known["ScaledObject"]["spec"]["triggers"]:
        found[trigger["metadata"]["query"]] = trigger["metadata"]["query"]
    return {name: query.replace("$__rate_interval", "5m") for name, query in found.items()}


def nodes(expression: Any) -> Iterator[Any]:
    """An expression, and all within it."""
    yield expression
    names = ("expr", "lhs", "rhs", "vector_selector")
    inner = [getattr(expression, name) for name in names if hasattr(expression, name)]
    for part in [*inner, *getattr(expression, "args", ())]:
        yield from nodes(part)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def labels(pair: TinyPair) -> dict[str, dict[str, set[str]]]:
    """Each label's values of each sample of an idle server."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    speculation = SpeculativeConfig(model=str(pair.peagle), num_speculative_tokens=2)
    llm = AsyncLLM(lambda: LLM(pair.target, speculation))
    try:
        text = Metrics("peagle", llm.llm.engine, llm.llm.draft_totals).text().decode()
    finally:
        llm.close()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                found[sample.name][label].add(value)
    return found


@pytest.mark.parametrize("name", queries())
def test_a_query_reads_what_the_server_tells(name: str, labels: dict[str, dict[str, set[str]]]):
    selected = [
        node
        for node in nodes(promql_parser.parse(queries()[name]))
        if isinstance(node, promql_parser.VectorSelector)
    ]
    assert selected
    for one in selected:
        assert one.name in labels
        for matcher in one.matchers.matchers:
            if matcher.value != "$model_name":
                assert matcher.value in labels[one.name][matcher.name]


@pytest.mark.parametrize("name", queries())
def test_a_query_groups_by_labels_there_are(name: str, labels: dict[str, dict[str, set[str]]]):
    for node in nodes(promql_parser.parse(queries()[name])):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            inner = [one for one in nodes(node) if isinstance(one, promql_parser.VectorSelector)]
            for one in inner:
                assert set(node.modifier.labels) <= OF_PROMETHEUS | labels[one.name].keys()


def test_all_speak_of_the_deployment_s_pods():
    known = documents()
    deployment = known["Deployment"]
    pods = deployment["spec"]["template"]["metadata"]["labels"]
    ports = [port["name"] for c in containers(deployment) for port in c["ports"]]
    assert known["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    for selector in (
        known["Service"]["spec"]["selector"],
        known["PodMonitor"]["spec"]["selector"]["matchLabels"],
        known["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= pods.items()
    used = [one["port"] for one in known["PodMonitor"]["spec"]["podMetricsEndpoints"]]
    used += [
        port["port"] for rule in known["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]
    ]
    assert set(used) <= set(ports)


def containers(deployment: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = deployment["spec"]["template"]["spec"]["containers"]
    return found
