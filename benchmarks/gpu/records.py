"""Records of both sides' processes: merged from parts, and told as a report tells them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.bench.case import OURS, Case
from peagle.bench.measures import NOT_MEASURED, Measures, Percentiles
from peagle.bench.pair import NAMES
from peagle.bench.runs import Failure, Run
from peagle.errors import InputError

Record = Mapping[str, Any]
SYNTHETIC = (
    "SYNTHETIC: random weights, acceptance length (AL) given; only the times mean anything. "
    "Greedy, without prefix caching."
)
MACHINE = ("device", "cpu", "cores", "threads", "python")
VERSIONS = ("peagle", "vllm", "torch", "transformers")


def median_runs(records: Sequence[Record]) -> list[Run]:
    """Every case that has figures, method after method; a later record's replace an earlier's."""
    found = {
        case: _run(case, run)
        for record in records
        for run in record["runs"]
        for case in [_case(record, run["concurrency"])]
    }
    matches = list(dict.fromkeys(map(_match, found)))

    def place(case: Case) -> tuple[Any, ...]:
        by_load = case.draft_length == "auto"
        return matches.index(_match(case)), case.engine, by_load, case.concurrency

    return [found[case] for case in sorted(found, key=place)]


def failures(records: Sequence[Record]) -> list[Failure]:
    """The first case of each record that failed, unless another record has its figures."""
    measured = {run.case for run in median_runs(records)}
    found = []
    for record in records:
        asked = [_case(record, concurrency) for concurrency in record["concurrencies"]]
        missing = [case for case in asked if case not in measured]
        if record["failure"] and missing:
            found.append(Failure(missing[0], record["failure"]))
    return found


def environment(results: Mapping[str, Any]) -> dict[str, Any]:
    """What all figures depend on; of a machine's facts all values, where parts differ."""
    begun = [one.get("environment", {}) for one in (results, *results["records"])]
    days = sorted(one["date"][:10] for one in begun if "date" in one)
    versions = [one.get("versions", {}) for one in begun]
    return {
        "synthetic": SYNTHETIC,
        "date": " to ".join(dict.fromkeys((days[0], days[-1]))),
        **{name: _values(begun, name) for name in MACHINE},
        "versions": {name: _values(versions, name) for name in VERSIONS},
        **results["work"],
    }


def _values(parts: Sequence[Record], name: str) -> str:
    return ", ".join(dict.fromkeys(str(part[name]) for part in parts if name in part))


def _case(record: Record, concurrency: int) -> Case:
    """A shape's prompts are random, so that it stands in their place."""
    given = f", AL {record['acceptance_length']:g}" if record["k"] else ""
    mode = record.get("draft_length", "fixed")
    method = NAMES[record["method"]] + given
    return Case(
        method, record["k"], concurrency, mode, data=record["shape"], engine=_engine(record)
    )


def _engine(record: Record) -> str:
    """With vLLM's settings, where they were not left to vLLM."""
    if record["side"] == "peagle":
        return OURS
    graphs = f"graphs to {record['captured']} rows" if record["captured"] else None
    return ", ".join(filter(None, ("vLLM", record.get("moe_backend"), graphs)))


def _match(case: Case) -> tuple[Any, ...]:
    return case.data, case.method, case.k


def _run(case: Case, run: Record) -> Run:
    found = Measures(
        otps=run["otps"],
        acceptance_length=run.get("acceptance_length"),
        acceptance_rate_per_position=tuple(run.get("acceptance_rate_per_position", ())),
        ttft_ms=_times(run, "ttft_ms"),
        itl_ms=_times(run, "itl_ms"),
        e2e_ms=_times(run, "e2e_ms"),
        output_tokens=run.get("output_tokens", 0),
        acceptance_length_interval=run.get("acceptance_length_interval"),
        tokens_per_cycle=run.get("tokens_per_cycle"),
    )
    return Run(case, found, (), rounds=tuple(run["rounds"]))


def _times(run: Record, name: str) -> Percentiles:
    """vLLM's side has none."""
    return Percentiles(**run[name]) if name in run else NOT_MEASURED


def merge(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results as if from one run; a later figure replaces an earlier one of the same kind.

    Raises `InputError` for different work or different cards.
    """
    *others, last = pieces
    for other in others:
        same_card = other["environment"]["device"] == last["environment"]["device"]
        if other["work"] != last["work"] or not same_card:
            raise InputError("results of different work or different cards do not belong together")
    return {**last, "records": [record for piece in pieces for record in piece["records"]]}


def read(path: Path) -> dict[str, Any]:
    """A results file. Raises `InputError`."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return found
