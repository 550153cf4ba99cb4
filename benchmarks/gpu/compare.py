"""Our engine against vLLM on one GPU: the same sizes, prompts, acceptance and number of tokens.

    python benchmarks/gpu/compare.py --vllm-python vllm/bin/python --out result

Weights are random and acceptance is set, so nothing has to be downloaded and both sides emit the
same number of tokens per cycle. With `--checkpoints` both sides read the target from one directory,
which `checkpoint.py` writes; packed targets, and experts whose routing is set, need it. Each match
is one process of `peagle bench` and one or two of `vllm_peer.py`, one after the other; the side
that begins alternates, since a warm card may run slower. After every process the directory holds
the results so far: comparison.json, and a report as `peagle bench --report` writes it; `draw.py`
makes one report of several.
A size that does not fit the card's free memory is refused before anything runs.
"""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import card
import matplotlib  # noqa: F401 (a long run learns now that it cannot draw)
import typer
from matches import DEFAULT, NOT_DUMMY, Match, Side, Work, schedule
from records import compared
from sides import Vllm, attempt, target_in

from peagle.bench.environment import machine
from peagle.bench.result_file import result_file
from peagle.bench.shapes import shape_of
from peagle.bench.synthetic import require_room
from peagle.cli.script import run
from peagle.errors import InputError
from peagle.files import refuse_existing

RESULTS = "comparison.json"


def main(
    out: Annotated[Path, typer.Option(help="Directory for the results.")],
    matches: Annotated[str, typer.Option(help="One or several SHAPE:METHOD[:K:AL].")] = DEFAULT,
    concurrency: Annotated[str, typer.Option(help="Numbers of requests in flight.")] = "1,8,64",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = Work.prompt_tokens,
    max_tokens: Annotated[int, typer.Option(help="Tokens per output.")] = Work.max_tokens,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and activations.")] = Work.dtype,
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Directory of targets that both sides read, written where missing."),
    ] = None,
    routing: Annotated[
        str | None, typer.Option(help="As in peagle bench, of targets that are read.")
    ] = None,
    moe_backend: Annotated[
        str, typer.Option(help="vLLM's kernels for experts: auto, triton, marlin, or several.")
    ] = "auto",
    vllm_python: Annotated[Path, typer.Option(help="vLLM's interpreter.")] = Path(sys.executable),
    vllm_path: Annotated[Path | None, typer.Option(help="Directory of vLLM's packages.")] = None,
    only: Annotated[Side | None, typer.Option(help="Run only this side.")] = None,
    first: Annotated[Side, typer.Option(help="Side that begins.")] = "peagle",
    timeout: Annotated[float, typer.Option(help="Seconds allowed per process.")] = 400,
    force: Annotated[bool, typer.Option("--force", help="Replace earlier results.")] = False,
) -> None:
    """Run both sides on every match; leaves no process behind when ended early.

    The exit code is 1 if every process failed.
    """
    refuse_existing(out / RESULTS, force)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    chosen = [Match.parse(text) for text in matches.split(",")]
    levels = tuple(int(level) for level in concurrency.split(","))
    vllm = Vllm(vllm_python, vllm_path)
    work = Work(prompt_tokens, max_tokens, dtype=dtype, routing=routing)
    backends = [None if name == "auto" else name for name in moe_backend.split(",")]
    _check_targets(chosen, checkpoints, work)
    for match in chosen:
        require_room(match.shape, [match.method], work.dtype, "auto", card.free_bytes())
    sides = _sides(only, first, vllm)
    seen = card.reading()
    where = machine() | {"device": seen.get("name", "no GPU"), "card": seen}
    results: dict[str, Any] = {"environment": where, "work": vars(work), "records": []}
    out.mkdir(parents=True, exist_ok=True)
    with result_file(out / RESULTS) as write:
        for trial in schedule(chosen, levels, sides, backends):
            shape = trial.match.shape
            target = target_in(checkpoints, shape, work, timeout) if checkpoints else None
            record = attempt(trial, work, vllm, timeout, target)
            results["records"].append(record)
            print(_brief(record), file=sys.stderr, flush=True)
            write(results)
            compared(results).write(out)
    compared(results).show()
    raise typer.Exit(1 if all(record["failure"] for record in results["records"]) else 0)


def _check_targets(matches: Sequence[Match], checkpoints: Path | None, work: Work) -> None:
    """Raise `InputError` where targets have to be read from a directory and none is given."""
    for match in matches:
        shape_of(match.shape).weights.routed(work.routing)  # an unknown one is refused
        if checkpoints is None and (work.routing or not match.plain):
            raise InputError(f"{match.shape} {NOT_DUMMY}: give --checkpoints DIR")


def _sides(only: Side | None, first: Side, vllm: Vllm) -> list[Side]:
    """The sides that run, the one that begins first."""
    sides: list[Side] = [only] if only else sorted(get_args(Side), key=lambda side: side != first)
    if "vllm" in sides and not vllm.found():
        print(f"{vllm.python} finds no vLLM: it is left out", file=sys.stderr)
        sides.remove("vllm")
    return sides


def _brief(record: dict[str, Any]) -> str:
    """One line per process."""
    speeds = {run["concurrency"]: round(run["otps"], 1) for run in record["runs"]}
    names = ("side", "shape", "method", "captured", "moe_backend", "draft_length", "seconds")
    asked = [record[name] for name in names]
    return json.dumps([*asked, speeds, record["failure"]])


if __name__ == "__main__":
    run(main)
