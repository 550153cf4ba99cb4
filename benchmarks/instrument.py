"""Whether `peagle bench` names what is faster, and says so when the machine was busy.

    python benchmarks/instrument.py --out instrument.json

Equal runs must not name different winners; a difference planted between two servers must be named
in every run; a run beside a busy process must warn. The exit code is 1 where one of these fails.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.script import run
from records.measuring import begun, written
from records.result import Row
from server_process import ServerProcess, started

SLOWER = Path(__file__).with_name("slower.py")
PLAIN, SLOWED = "plain", "slower"
BUSY = [sys.executable, "-c", "while True: pass"]
ROUNDS = 9
"""The fewest that name a winner though one of them was disturbed; six must all agree."""
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
KEPT = ("verdict", "first", "second", "clear", "ratio")
METHODS = ("none", "eagle3", "peagle", PLAIN, SLOWED)
UNITS = {"ratio": "times", "interval": "times"} | {f"{name}_rounds": "tokens/s" for name in METHODS}


def main(
    runs: Annotated[int, typer.Option(help="Equal runs, and runs with the difference.")] = 6,
    planted: Annotated[float, typer.Option(help="Share by which one server is slower.")] = 0.1,
    limit: Annotated[int, typer.Option(help="Number of prompts.")] = 6,
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = ROUNDS,
    out: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Run all, a line each, and say what failed."""
    about = begun("What peagle bench says of equal work, a planted difference, and a busy machine")
    asked = {"planted": planted, "prompts": limit, "rounds": rounds}
    flags = ["--limit", str(limit), "--rounds", str(rounds)]
    rows: list[Row] = []
    with written(out, about, UNITS, **asked) as write:
        for row in measured(runs, planted, flags):
            rows.append({"run": len(rows) + 1, **row})
            doubted = f" Doubted: {row['doubts']}." if row["doubts"] else ""
            print(f"{row['kind']}: {row['verdict']}{doubted}", flush=True)
            write(rows)
    failures = list(wrong(rows))
    for failure in failures:
        print(failure)
    raise typer.Exit(1 if failures else 0)


def measured(runs: int, planted: float, flags: Sequence[str]) -> Iterator[Row]:
    """Every run as it ends; flags: of `peagle bench`, for all of them."""
    for _ in range(runs):
        yield _bench("equal", flags)
    with _server(0.0) as plain, _server(planted) as slower:
        urls = ["--url", f"{PLAIN}={plain.url}", "--url", f"{SLOWED}={slower.url}"]
        for _ in range(runs):
            yield _bench("planted", [*urls, *flags])
    with _running(BUSY):
        yield _bench("busy", flags)


def wrong(rows: Sequence[Row]) -> Iterator[str]:
    """What the instrument did not do, a sentence each."""
    winners = {str(row["first"]) for row in rows if row["kind"] == "equal" and row["clear"]}
    if len(winners) > 1:
        yield f"equal runs named different winners: {', '.join(sorted(winners))}"
    planted = [row for row in rows if row["kind"] == "planted"]
    missed = [row for row in planted if not row["clear"] or row["first"] != PLAIN]
    if missed:
        yield f"the planted difference was missed in {len(missed)} of {len(planted)} runs"
    if any(row["kind"] == "busy" and not row["doubts"] for row in rows):
        yield "the run beside a busy process did not say so"


def _bench(kind: str, flags: Sequence[str]) -> Row:
    """What one run in a process of its own says; exits if it fails."""
    command = [sys.executable, "-m", "peagle", "bench", *flags, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"peagle bench ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    [verdict] = found["verdicts"]
    said: Row = {"kind": kind, **{name: verdict[name] for name in KEPT}}
    said["interval"] = tuple(verdict["interval"]) if verdict["interval"] else None
    said["doubts"] = "; ".join(found["doubts"]) or None
    rounds = {run["method"]: tuple(round(one, 1) for one in run["rounds"]) for run in found["runs"]}
    return said | {f"{name}_rounds": speeds for name, speeds in rounds.items()}


def _server(share: float) -> AbstractContextManager[ServerProcess]:
    """The bundled pair's, slower by a share."""
    command = [sys.executable, str(SLOWER), str(share), "--device", "cpu", "--port"]
    return started(command, environment=ONE_THREAD)


@contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    """A process that ends with the block."""
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    run(main)
