"""Records of both sides' processes: merged from parts, and told as a report tells them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from told import SYNTHETIC, Told, days, run_of, shared

from peagle.bench.case import OURS, Case
from peagle.bench.pair import NAMES
from peagle.bench.runs import Failure, Run
from peagle.errors import InputError

Record = Mapping[str, Any]
MACHINE = ("device", "cpu", "cores", "threads", "python")
VERSIONS = ("peagle", "vllm", "torch", "transformers")


def compared(results: Mapping[str, Any]) -> Told:
    """What a report tells of some records."""
    records = results["records"]
    return Told(environment(results), median_runs(records), failures=failures(records))


def median_runs(records: Sequence[Record]) -> list[Run]:
    """Every case that has figures, method after method; a later record's replace an earlier's."""
    found = {
        case: run_of(case, run)
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
    facts = shared(begun)
    versions = facts.get("versions", {})
    return {
        "synthetic": f"{SYNTHETIC} Greedy, without prefix caching.",
        "date": days(begun),
        **{name: facts[name] for name in MACHINE if name in facts},
        "versions": {name: versions[name] for name in VERSIONS if name in versions},
        **results["work"],
    }


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
