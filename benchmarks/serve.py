"""Our server and vLLM's on one card, with one checkpoint, as their clients see them.

    python benchmarks/serve.py MODEL --prompts questions.jsonl --concurrency 64,256 --out result

Starts both, each with its defaults and a share of the card's memory, and lets `peagle bench --url`
load them in turns: tokens per second, latencies, acceptance. Prompts are pieces of the given files,
of random lengths, most short and few long; answers end where the model ends them. With `--burst`,
so many prompts then come at once, of which all but a fifth is a beginning that they share, and want
eight tokens each; `--chats` asks whole prompts. `--beside none,chains` starts more servers: both
without speculation, and ours with drafts that do not branch; where `--cache-bytes` says what each
keeps, all start at once. The directory holds `result.json`, which `keep.py` keeps, with the
processor time of each server's processes, idle turns included; and report/ and a file for each load
of that command.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
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

NAME, BURST = "model", "burst"
START_SECONDS, REPORT_SECONDS = 400.0, 60.0
SPREAD = 1.0
"""Deviation of the logarithm of a prompt's length."""
CHARACTERS, BURST_CHARACTERS = (400, 6000), (1600, 6000)
"""The median length of a prompt, and the most."""
SHARED = 0.8
"""How much of each prompt of a burst all of them begin with."""
MORE = ("none", "chains")
"""What `--beside` may name."""
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
    chats: Annotated[
        str, typer.Option(help="C:N, …: N whole prompts of each file, C at once.")
    ] = "",
    burst: Annotated[int, typer.Option(help="Prompts that come at once, at the end.")] = 0,
    temperature: Annotated[str, typer.Option(help="As in peagle bench.")] = "0",
    speculative_config: Annotated[str, typer.Option(help="vLLM's JSON, for both.")] = "",
    beside: Annotated[str, typer.Option(help="More servers: none, chains, or both.")] = "",
    memory: Annotated[float, typer.Option(help="Share of the card's memory for each.")] = 0.42,
    cache_bytes: Annotated[int, typer.Option(help="Bytes for each's keys and values.")] = 0,
    api_server_count: Annotated[int, typer.Option(help="Processes in front of each.")] = 1,
    vllm_python: Annotated[Path, typer.Option(help="vLLM's interpreter.")] = Path(sys.executable),
    vllm_path: Annotated[Path | None, typer.Option(help="Directory of vLLM's packages.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the prompts.")] = 0,
) -> None:
    """Measure both; no server is left behind, however this ends."""
    if out.exists():
        raise InputError(f"{out} exists; give another directory")
    whole = [one.split(":") for one in chats.split(",") if one]
    if not all(len(pair) == 2 and all(map(str.isdecimal, pair)) for pair in whole):
        raise InputError(f"--chats takes C:N, and a comma before the next, not {chats}")
    more = [name for name in beside.split(",") if name]
    if unknown := set(more) - set(MORE):
        raise InputError(f"--beside takes {', '.join(MORE)}, not {', '.join(sorted(unknown))}")
    given = json.loads(speculative_config) if speculative_config else {}
    if more and not given:
        raise InputError("--beside is for servers beside those of --speculative-config")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    out.mkdir(parents=True)
    _write_prompts(out / "prompts.jsonl", pieces(prompts, requests, CHARACTERS, seed))
    _write_prompts(out / "burst.jsonl", pieces(prompts, burst, BURST_CHARACTERS, seed, SHARED))
    flags = ["--served-model-name", NAME, "--gpu-memory-utilization", str(memory)]
    flags += ["--api-server-count", str(api_server_count)]
    if cache_bytes:
        flags += ["--kv-cache-memory-bytes", str(cache_bytes)]
    vllm = Vllm(vllm_python, vllm_path)
    servers = {one.name: one for one in _servers([model, *flags], given, more, vllm)}
    about = begun(f"Both servers over HTTP, {Path(model).name}", card.reading())
    asked: dict[str, Any] = {"memory": memory, "requests": requests, "max_tokens": max_tokens}
    asked |= {"api_server_count": api_server_count}
    asked |= {"cache_bytes": cache_bytes} if cache_bytes else {}
    about["setting"] = asked | _speculation(given)
    every = ["--max-tokens", max_tokens, "--temperature", temperature]
    loads = {"bench": [*every, "--concurrency", concurrency, "--prompts", out / "prompts.jsonl"]}
    loads["bench"] += ["--report", out / "report"]
    files = [flag for file in prompts for flag in ("--prompts", file)]
    for at_once, limit in whole:
        loads[f"chats-{at_once}"] = [*every, "--concurrency", at_once, "--limit", limit, *files]
    if burst:
        at_end = ["--max-tokens", 8, "--concurrency", burst, "--prompts", out / "burst.jsonl"]
        loads[BURST] = [*at_end, "--temperature", temperature]
    with ExitStack() as running:

        def start(one: Server) -> None:
            log = out / f"{one.name}.log"
            one.process = running.enter_context(
                started(one.command, log, one.environment, START_SECONDS)
            )

        # one that measures what memory is left must start alone
        with ThreadPoolExecutor(len(servers) if cache_bytes else 1) as pool:
            list(pool.map(start, servers.values()))
        for one in servers.values():
            one.before = processor_seconds(one.process)
        rows: list[Row] = []
        for name, load in loads.items():
            try:
                _bench(servers, [*load, "--rounds", rounds, "--json", out / f"{name}.json"])
            finally:  # what was measured counts, however it ended
                documents = _documents(out, loads)
                if documents:
                    rows = rows if name == BURST else _rows(documents, servers)
                    _write(out, about, documents, rows, servers)


@dataclass
class Server:
    """One of the servers that take turns."""

    side: str
    command: list[str]
    """How it is started, but for its port."""
    environment: Mapping[str, str]
    speculation: Mapping[str, Any]
    setting: str = ""
    """What of it is not as users start it."""
    process: ServerProcess = field(init=False)
    before: tuple[float, float] = field(init=False)
    """Its processor time when it had started."""

    @property
    def name(self) -> str:
        """As reports name it."""
        return "-".join(filter(None, (self.side, self.setting)))


def _servers(
    flags: Sequence[str], given: Mapping[str, Any], more: Sequence[str], vllm: Vllm
) -> Iterator[Server]:
    """Both, and more of them. given: their speculative configuration."""
    ours: list[str] = [sys.executable, "-m", "peagle", "serve", *flags]
    theirs = [str(vllm.python), "-m", "vllm.entrypoints.cli.main", "serve", *flags]
    sides = {
        "peagle": (ours, os.environ),
        "vllm": (theirs, {**vllm.environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    }

    def server(side: str, speculation: Mapping[str, Any], setting: str = "") -> Server:
        command, environment = sides[side]
        config = ["--speculative-config", json.dumps(speculation)] if speculation else []
        return Server(side, [*command, *config, "--port"], environment, speculation, setting)

    yield from (server(side, given) for side in sides)
    if "none" in more:
        yield from (server(side, {}, "none") for side in sides)
    if "chains" in more:
        yield server("peagle", {**given, "num_tree_nodes": 0}, "chains")


def _documents(out: Path, loads: Mapping[str, Any]) -> dict[str, Any]:
    """What `peagle bench` wrote so far, by load."""
    files = {name: out / f"{name}.json" for name in loads}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def _rows(documents: Mapping[str, Any], servers: Mapping[str, Server]) -> list[Row]:
    """What the processes of each server took, which is printed as well."""
    tokens = _tokens([run for one in documents.values() for run in one["runs"]])
    rows: list[Row] = []
    for name, server in servers.items():
        pairs = zip(processor_seconds(server.process), server.before, strict=True)
        seconds, in_front = (now - then for now, then in pairs)
        each = 1e6 / max(tokens.get(name, 0), 1)
        row: Row = {
            "side": name,
            "start_seconds": round(server.process.start_seconds, 1),
            "tokens": tokens.get(name, 0),
            "processor_seconds": round(seconds, 2),
            "microseconds_per_token": round(seconds * each, 2),
            "in_the_first_process": round(in_front * each, 2),
        }
        print(row)
        rows.append(row)
    return rows


def _write(
    out: Path,
    about: Mapping[str, Any],
    documents: Mapping[str, Any],
    rows: Sequence[Row],
    servers: Mapping[str, Server],
) -> None:
    """The result so far: what clients saw, and what the servers took."""
    versions = {side: {side: UNKNOWN} for side in ("peagle", "vllm")} | about["versions"]
    for one in next(iter(documents.values()))["environment"]["servers"]:
        side = servers[one["name"]].side
        versions[side] = {**versions[side], side: str(one["version"])}
    entries = [entry for one in documents.values() for entry in one["runs"]]
    runs = [_run(entry, servers[entry["method"]]) for entry in entries]
    doubts = [doubt for one in documents.values() for doubt in one["doubts"]]
    found = {**about, "versions": versions, "runs": runs, "rows": rows, "doubts": doubts}
    write(Result.model_validate({**found, "units": UNITS}), out / "result.json")


def _run(entry: Mapping[str, Any], server: Server) -> Run:
    """A server's run, with the method and K that it was started with; ours drafts by load."""
    given = server.speculation
    k, method = given.get("num_speculative_tokens", 0), "none"
    if given:
        by_draft = "eagle3" if given.get("parallel_drafting") is False else "peagle"
        method = "ngram" if given["method"] == "ngram" else by_draft
    mode = "auto" if k and server.side == "peagle" else "fixed"
    setting = "" if server.setting == "none" else server.setting
    return run_of(entry, side=server.side, setting=setting, method=method, k=k, draft_length=mode)


def _speculation(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a result says of it: without its drafter's place on this machine."""
    if not given:
        return {}
    return {"speculation": {**given, "model": Path(given.get("model", "")).name}}


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


def _bench(servers: Mapping[str, Server], flags: Sequence[Any]) -> None:
    """Load the servers in turns; exits if that fails."""
    addresses = [f"{name}={one.process.url}" for name, one in servers.items()]
    urls = [flag for address in addresses for flag in ("--url", address)]
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
