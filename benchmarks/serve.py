"""Our server and vLLM's on one card, with one checkpoint, as their clients see them.

    python benchmarks/serve.py MODEL --prompts questions.jsonl --concurrency 64,256 --out result

Starts both, each with its defaults and a share of the card's memory, and lets `peagle bench --url`
load them in turns: tokens per second, latencies, acceptance. Prompts are pieces of the given files,
of random lengths, most short and few long; answers end where the model ends them. With `--burst`,
so many prompts then come at once, of which all but a fifth is a beginning that they share, and want
eight tokens each. The directory holds `result.json`, which `keep.py` keeps, with the processor time
of each server's processes, idle turns included; and bench.json, burst.json and report/ of that
command.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.bench.prompts import load_prompts
from peagle.cli.script import run
from peagle.errors import InputError
from peers import card
from peers.processes import Vllm
from records.bench import run_of
from records.measuring import begun
from records.result import UNKNOWN, Result, Row, Run
from records.store import write
from server_process import ServerProcess, family, started

NAME = "model"
START_SECONDS, REPORT_SECONDS = 400.0, 60.0
SPREAD = 1.0
"""Deviation of the logarithm of a prompt's length."""
CHARACTERS, BURST_CHARACTERS = (400, 6000), (1600, 6000)
"""The median length of a prompt, and the most."""
SHARED = 0.8
"""How much of each prompt of a burst all of them begin with."""
TICKS = os.sysconf("SC_CLK_TCK")
UNITS = {
    "start_seconds": "s",
    "tokens": "tokens",
    "processor_seconds": "s",
    "microseconds_per_token": "us",
    "in_the_first_process": "us",
}


def main(
    model: Annotated[str, typer.Argument(help="The target: a directory.")],
    prompts: Annotated[list[Path], typer.Option(help="Files whose text prompts are cut from.")],
    out: Annotated[Path, typer.Option(help="Directory for the results.")],
    concurrency: Annotated[str, typer.Option(help="Numbers of requests in flight.")] = "1,8,64",
    requests: Annotated[int, typer.Option(help="Requests of each number, in a round.")] = 256,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds, in turns.")] = 2,
    burst: Annotated[int, typer.Option(help="Prompts that come at once, at the end.")] = 0,
    temperature: Annotated[str, typer.Option(help="As in peagle bench.")] = "0",
    speculative_config: Annotated[str, typer.Option(help="vLLM's JSON, for both.")] = "",
    memory: Annotated[float, typer.Option(help="Share of the card's memory for each.")] = 0.42,
    api_server_count: Annotated[int, typer.Option(help="Processes in front of each.")] = 1,
    vllm_python: Annotated[Path, typer.Option(help="vLLM's interpreter.")] = Path(sys.executable),
    vllm_path: Annotated[Path | None, typer.Option(help="Directory of vLLM's packages.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the prompts.")] = 0,
) -> None:
    """Measure both; no server is left behind, however this ends."""
    if out.exists():
        raise InputError(f"{out} exists; give another directory")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    out.mkdir(parents=True)
    _write_prompts(out / "prompts.jsonl", pieces(prompts, requests, CHARACTERS, seed))
    _write_prompts(out / "burst.jsonl", pieces(prompts, burst, BURST_CHARACTERS, seed, SHARED))
    vllm = Vllm(vllm_python, vllm_path)
    commands = _commands(model, speculative_config, memory, api_server_count, vllm)
    flags = ["--concurrency", concurrency, "--max-tokens", max_tokens, "--rounds", rounds]
    flags += ["--temperature", temperature, "--json", out / "bench.json"]
    flags += ["--report", out / "report", "--prompts", out / "prompts.jsonl"]
    at_once = ["--concurrency", burst, "--max-tokens", 8, "--rounds", rounds]
    at_once += ["--json", out / "burst.json", "--prompts", out / "burst.jsonl"]
    about = begun(f"Both servers over HTTP, {Path(model).name}", card.reading())
    asked: dict[str, Any] = {"memory": memory, "requests": requests, "max_tokens": max_tokens}
    asked |= {"api_server_count": api_server_count}
    about["setting"] = asked | _speculation(speculative_config)
    rows: list[Row] = []
    with ExitStack() as running:
        servers = {
            name: running.enter_context(
                started(command, out / f"{name}.log", environment, start_seconds=START_SECONDS)
            )
            for name, (command, environment) in commands.items()
        }
        before = {name: processor_seconds(server) for name, server in servers.items()}
        try:
            _bench(servers, flags)
        finally:  # what was measured counts, however it ended
            if (out / "bench.json").exists():
                rows = _rows(out, servers, before)
                _write(out, about, rows)
        if burst:
            _bench(servers, at_once)
            _write(out, about, rows)


def _rows(
    out: Path,
    servers: Mapping[str, ServerProcess],
    before: Mapping[str, tuple[float, float]],
) -> list[Row]:
    """What the processes of each server took, which is printed as well."""
    tokens = _tokens(json.loads((out / "bench.json").read_text())["runs"])
    rows: list[Row] = []
    for name, server in servers.items():
        pairs = zip(processor_seconds(server), before[name], strict=True)
        seconds, in_front = (now - then for now, then in pairs)
        each = 1e6 / max(tokens.get(name, 0), 1)
        row: Row = {
            "side": name,
            "start_seconds": round(server.start_seconds, 1),
            "tokens": tokens.get(name, 0),
            "processor_seconds": round(seconds, 2),
            "microseconds_per_token": round(seconds * each, 2),
            "in_the_first_process": round(in_front * each, 2),
        }
        print(row)
        rows.append(row)
    return rows


def _write(out: Path, about: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """The result so far: what clients saw, and what the servers took."""
    documents = [
        json.loads((out / name).read_text())
        for name in ("bench.json", "burst.json")
        if (out / name).exists()
    ]
    versions = {side: {side: UNKNOWN} for side in ("peagle", "vllm")} | about["versions"]
    for one in documents[0]["environment"]["servers"]:
        versions[one["name"]] = {**versions[one["name"]], one["name"]: str(one["version"])}
    given = about["setting"].get("speculation", {})
    runs = [_run(entry, given) for one in documents for entry in one["runs"]]
    doubts = [doubt for one in documents for doubt in one["doubts"]]
    found = {**about, "versions": versions, "runs": runs, "rows": rows, "doubts": doubts}
    write(Result.model_validate({**found, "units": UNITS}), out / "result.json")


def _run(entry: Mapping[str, Any], given: Mapping[str, Any]) -> Run:
    """A server's run, with the method and K that it was started with; ours drafts by load."""
    k, method = given.get("num_speculative_tokens", 0), "none"
    if given:
        by_draft = "eagle3" if given.get("parallel_drafting") is False else "peagle"
        method = "ngram" if given["method"] == "ngram" else by_draft
    mode = "auto" if k and entry["method"] == "peagle" else "fixed"
    return run_of(entry, side=entry["method"], method=method, k=k, draft_length=mode)


def _speculation(config: str) -> dict[str, Any]:
    """What a result says of it: without its drafter's place on this machine."""
    if not config:
        return {}
    given = json.loads(config)
    return {"speculation": given | {"model": Path(given.get("model", "")).name}}


def pieces(
    files: Sequence[Path],
    count: int,
    characters: tuple[int, int],
    seed: int,
    shared: float = 0.0,
) -> list[str]:
    """Texts of random lengths, cut at random places from the prompts of some files.

    characters: their median, and the most; shared: how much of each is the files' beginning.
    """
    text = "\n\n".join(prompt.text for file in files for prompt in load_prompts(str(file)))
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        length = int(characters[0] * draw.lognormvariate(0, SPREAD)) + 1
        length = min(length, characters[1], len(text))
        alike = int(shared * length)
        begin = draw.randrange(len(text) - length + 1)
        own = text[begin : begin + length - alike].strip()
        found.append((text[:alike] + own) or "Hello")
    return found


def _write_prompts(file: Path, texts: Sequence[str]) -> None:
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def _commands(
    model: str, speculation: str, memory: float, fronts: int, vllm: Vllm
) -> dict[str, tuple[list[str], Mapping[str, str]]]:
    """How each server is started, but for its port; and its environment."""
    flags = [model, "--served-model-name", NAME, "--gpu-memory-utilization", str(memory)]
    if speculation:
        flags += ["--speculative-config", speculation]
    flags += ["--api-server-count", str(fronts), "--port"]
    theirs = [str(vllm.python), "-m", "vllm.entrypoints.cli.main", "serve", *flags]
    environment = {**vllm.environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return {
        "peagle": ([sys.executable, "-m", "peagle", "serve", *flags], os.environ),
        "vllm": (theirs, environment),
    }


def _bench(servers: Mapping[str, ServerProcess], flags: Sequence[Any]) -> None:
    """Load the servers in turns; exits if that fails."""
    urls = [flag for name, one in servers.items() for flag in ("--url", f"{name}={one.url}")]
    command = [sys.executable, "-m", "peagle", "bench", "--chat", "--no-ignore-eos", *urls]
    process = subprocess.Popen([*command, *map(str, flags)])
    try:
        process.wait()
    except KeyboardInterrupt:  # it got the same signal, and writes its report
        process.wait(REPORT_SECONDS)
        raise
    if process.returncode:
        sys.exit(f"peagle bench ended with {process.returncode}")


def _tokens(runs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Tokens that each server wrote, over all rounds."""
    found: dict[str, int] = {}
    for one in runs:
        wrote = one["output_tokens"] * len(one["rounds"])
        found[one["method"]] = found.get(one["method"], 0) + wrote
    return found


def processor_seconds(server: ServerProcess) -> tuple[float, float]:
    """User and system time of all its processes, with those that ended and were waited for, and
    of the first."""
    times = {pid: _processor_seconds(pid) for pid in family([server.pid])}
    return sum(times.values()), times[server.pid]


def _processor_seconds(pid: int) -> float:
    with suppress(OSError):  # it ended
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / TICKS
    return 0.0


if __name__ == "__main__":
    run(main)
