"""From what `peagle bench --json` keeps to a result, and back to what its reports are made of."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.bench import measures, runs
from peagle.bench.case import OURS, Case
from peagle.bench.pair import NAMES
from records.result import UNKNOWN, Machine, Percentiles, Process, Result, Run

ROOT = Path(__file__).parents[2]
COMMIT = "PEAGLE_COMMIT"
"""The variable that names the commit where a copy of the project has no history."""
PEERS = {"vllm": "vLLM"}
"""Sides as people write them."""
HOST = ("cpu", "cores", "threads", "python")
APART = ("date", "device", "versions", "card", "synthetic", "servers", *HOST)
"""Facts of a run that are no setting of its figures."""
TIMED = ("ttft_ms", "itl_ms", "e2e_ms")
OTHERS = (
    "acceptance_length",
    "acceptance_rate_per_position",
    "output_tokens",
    "acceptance_length_interval",
    "tokens_per_cycle",
    "mean_step_ms",
)
NOT_OURS = ("otps", "engine", "quantize_activations", "identical_to_none")
"""Keys of a run's entry that `Run` has under another name, or not at all."""


def measured_commit() -> str:
    """The commit of the project's files, `UNKNOWN` where they have no history."""
    if COMMIT in os.environ:
        return os.environ[COMMIT]

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def machine_of(facts: Mapping[str, Any]) -> Machine:
    """Where the figures of some facts were measured."""
    card = facts.get("card", {})
    device = facts.get("device") or card.get("name", UNKNOWN)
    return Machine(
        device=device, card=card, **{name: facts[name] for name in HOST if name in facts}
    )


def run_of(entry: Mapping[str, Any], **more: Any) -> Run:
    """A run of an entry of a result file. more: what the entry tells otherwise, or not."""
    given = {name: value for name, value in entry.items() if name not in NOT_OURS}
    given |= {name: None for name in TIMED if not _timed(entry, name)}
    return Run(**{**given, **more})


def result_of(document: Mapping[str, Any], measured: str, **more: Any) -> Result:
    """The result that `peagle bench --json` wrote, of models or of servers."""
    facts = document["environment"]
    setting = {name: value for name, value in facts.items() if name not in APART}
    servers = facts.get("servers")
    versions = {one["name"]: {"version": str(one["version"])} for one in servers or ()}
    entries = document["runs"]
    if servers:
        found = [run_of(one, side=one["method"], method="server") for one in entries]
    else:
        versions = {OURS: facts["versions"]}
        given = facts["acceptance_length"] if "synthetic" in facts else None
        found = [run_of(one, given_acceptance=given if one["k"] else None) for one in entries]
    values = {
        "measured": measured,
        "date": facts["date"],
        "machine": machine_of(facts),
        "versions": versions,
        "setting": setting,
        "notes": tuple(filter(None, (facts.get("synthetic"), *document.get("notes", ())))),
        "doubts": tuple(document.get("doubts", ())),
        "runs": tuple(found),
    }
    return Result(**{**values, **more})


def drawn_runs(result: Result) -> list[runs.Run]:
    """The runs that have a speed, as a report of `peagle bench` takes them."""
    return [_drawn(run, bool(result.processes)) for run in result.runs if run.rounds]


def drawn_failures(result: Result) -> list[runs.Failure]:
    """The processes that failed, each by its largest number of requests."""
    failed = [process for process in result.processes if process.failure]
    return [
        runs.Failure(
            replace(_case(one, True), concurrency=max(one.concurrencies)), str(one.failure)
        )
        for one in failed
    ]


def environment_of(result: Result) -> dict[str, Any]:
    """What a report says of the machine and the settings."""
    known = {name: value for name, value in result.machine if value not in (UNKNOWN, {})}
    versions: dict[str, Any] = dict(result.versions)
    if versions.keys() == {OURS}:
        versions = versions[OURS]
    about = {"measured": result.measured, "commit": result.commit, "command": result.command}
    return {"date": result.date, **about, **known, "versions": versions, **result.setting}


def engine_of(side: str, setting: str) -> str:
    """A side with what of it was not left to it."""
    return ", ".join(filter(None, (PEERS.get(side, side), setting)))


def _timed(entry: Mapping[str, Any], name: str) -> bool:
    return bool(entry.get(name)) and entry[name]["p50"] > 0


def _drawn(run: Run, beside: bool) -> runs.Run:
    """beside: whether engines ran one after the other, each in processes of its own."""
    given: dict[str, Any] = {name: getattr(run, name) for name in OTHERS}
    given |= {name: _percentiles(getattr(run, name)) for name in TIMED}
    found = measures.Measures(otps=run.speed or 0.0, **given)
    load = {name: getattr(run, name) for name in ("concurrency", "temperature", "request_rate")}
    case = replace(_case(run, beside), **load)
    others = {
        name: getattr(run, name) for name in ("same_text", "failed", "core_share", "branches")
    }
    return runs.Run(case, found, (), rounds=run.rounds, **others)


def _case(one: Run | Process, beside: bool) -> Case:
    """Who ran how; of our own engine a setting is told with the prompts."""
    ours = one.side == OURS
    engine = OURS if ours else engine_of(one.side, one.setting)
    data = ", ".join(filter(None, (one.data, one.setting))) if ours else one.data
    if one.k is None:
        return Case(one.side, None, 0, data=data)
    given = one.given_acceptance if isinstance(one, Run) and one.k else None
    told = f"{NAMES.get(one.method, one.method)}, AL {given:g}" if given else one.method
    if beside:
        return Case(told, one.k, 0, one.draft_length, data, engine=engine)
    return Case(told if ours else engine, one.k, 0, one.draft_length, data)


def _percentiles(found: Percentiles | None) -> measures.Percentiles:
    return measures.Percentiles(**found.model_dump()) if found else measures.NOT_MEASURED
