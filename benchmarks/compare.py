"""Our engine against vLLM on one GPU: the same sizes, prompts, acceptance and number of tokens.

    python benchmarks/compare.py --vllm-python vllm/bin/python --out result

Weights are random and acceptance is set, so nothing has to be downloaded and both sides emit the
same number of tokens per cycle. With `--checkpoints` both sides read the target from one directory,
which `checkpoint.py` writes; packed targets, and experts whose routing is set, need it. Each match
is one process of `peagle bench` and one or two of vLLM, one after the other; the side that begins
alternates, since a warm card may run slower. After every process the directory holds what was
measured so far: `result.json`, which `keep.py` keeps, and a report. A size that does not fit the
card's free memory is refused before anything runs.

vLLM takes minutes to start. With `--together` all its processes start at once, each with the share
of the card's memory that `--engine-args` gives it, wait, and take turns, one of each match with the
larger graphs where two would run; ours follow, whatever `--first` says.
"""

import json
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import matplotlib  # noqa: F401 (a long run learns now that it cannot draw)
import typer

from draw import show, write_report
from peagle.bench.shapes import shape_of
from peagle.bench.synthetic import require_room
from peagle.cli.script import run
from peagle.errors import InputError
from peagle.files import refuse_existing
from peers import card
from peers.job import LOOK_SECONDS
from peers.processes import Attempt, Vllm, attempt, beginning, routing_of, target_in
from peers.trials import DEFAULT, NOT_DUMMY, Match, Side, Trial, Work, at_once, schedule
from records.measuring import begun
from records.result import UNKNOWN, Result
from records.store import write

RESULT, REPORT = "result.json", "report"
SYNTHETIC = "SYNTHETIC: random weights, acceptance length (AL) given; only the times mean anything."


def main(
    out: Annotated[Path, typer.Option(help="Directory for the results.")],
    matches: Annotated[str, typer.Option(help="One or several SHAPE:METHOD[:K:AL].")] = DEFAULT,
    concurrency: Annotated[str, typer.Option(help="Numbers of requests in flight.")] = "1,8,64",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = Work.prompt_tokens,
    max_tokens: Annotated[int, typer.Option(help="Tokens per output.")] = Work.max_tokens,
    rounds: Annotated[int, typer.Option(help="Rounds of each side.")] = Work.rounds,
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
    engine_args: Annotated[str, typer.Option(help="JSON: more arguments of vllm.LLM.")] = "{}",
    vllm_python: Annotated[Path, typer.Option(help="vLLM's interpreter.")] = Path(sys.executable),
    vllm_path: Annotated[Path | None, typer.Option(help="Directory of vLLM's packages.")] = None,
    only: Annotated[Side | None, typer.Option(help="Run only this side.")] = None,
    first: Annotated[Side, typer.Option(help="Side that begins.")] = "peagle",
    together: Annotated[bool, typer.Option(help="Start vLLM's processes at once.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds allowed per process.")] = 400,
    force: Annotated[bool, typer.Option("--force", help="Replace earlier results.")] = False,
) -> None:
    """Run both sides on every match; leaves no process behind when ended early.

    The exit code is 1 if every process failed.
    """
    refuse_existing(out / RESULT, force)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    chosen = [Match.parse(text) for text in matches.split(",")]
    levels = tuple(int(level) for level in concurrency.split(","))
    vllm = Vllm(vllm_python, vllm_path, json.loads(engine_args))
    work = Work(prompt_tokens, max_tokens, rounds, dtype=dtype, routing=routing)
    backends = [None if name == "auto" else name for name in moe_backend.split(",")]
    _check_targets(chosen, checkpoints, work)
    for match in chosen:
        require_room(match.shape, [match.method], work.dtype, "auto", card.free_bytes())
    sides = _sides(only, first, vllm)
    about = begun(f"peagle beside vLLM, {matches}", card.reading())
    about["setting"] = _setting(work, chosen, checkpoints, vllm) | (
        {"vLLM's processes": "started at once"} if together and "vllm" in sides else {}
    )
    out.mkdir(parents=True, exist_ok=True)
    done: list[Attempt] = []
    plan = Plan([*schedule(chosen, levels, sides, backends)], work, vllm, checkpoints, timeout)
    for one in plan.together(levels) if together else plan.in_turn(plan.trials):
        done.append(one)
        print(_brief(one), file=sys.stderr, flush=True)
        found = compared(about, done)
        write(found, out / RESULT)
        if found.runs:
            write_report(found, out / REPORT)
    show(compared(about, done))
    raise typer.Exit(1 if all(one.process.failure for one in done) else 0)


@dataclass(frozen=True)
class Plan:
    """Processes, and what all have in common."""

    trials: Sequence[Trial]
    work: Work
    vllm: Vllm
    checkpoints: Path | None
    """Where targets are that both sides read."""
    timeout: float

    def in_turn(self, trials: Iterable[Trial]) -> Iterator[Attempt]:
        """Each process starts when the one before it has ended."""
        for trial in trials:
            yield attempt(trial, self.work, self.vllm, self.timeout, self._target(trial))

    def together(self, levels: tuple[int, ...]) -> Iterator[Attempt]:
        """vLLM's processes start at once and take turns, each alone at work; ours follow."""
        theirs = [(one, self._target(one)) for one in at_once(self.trials, levels)]
        before = card.reading()
        with ExitStack() as stack:
            begun = [
                stack.enter_context(beginning(trial, self.work, self.vllm, target, waits=True))
                for trial, target in theirs
            ]
            until = time.monotonic() + self.timeout
            while not all(one.waits for one in begun) and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
            for one in begun:
                one.refuse(self.timeout)  # nobody starts while another one measures
            for one in begun:
                yield one.end(self.timeout, card.reading())
        card.freed(float(before.get("memory.used", 0)))
        yield from self.in_turn(one for one in self.trials if one.side == "peagle")

    def _target(self, trial: Trial) -> Path | None:
        if self.checkpoints is None:
            return None
        return target_in(self.checkpoints, trial.match.shape, self.work, self.timeout)


def compared(about: Mapping[str, Any], done: Sequence[Attempt]) -> Result:
    """What both sides measured so far, as one result."""
    versions: dict[str, Mapping[str, str]] = {}
    for one in done:
        if one.versions or one.process.side not in versions:
            side = one.process.side
            versions[side] = one.versions or {side: UNKNOWN}
    return Result(
        **{**about, "versions": versions},
        notes=(SYNTHETIC,),
        processes=tuple(one.process for one in done),
        runs=tuple(run for one in done for run in one.runs),
    )


def _setting(
    work: Work, matches: Iterable[Match], checkpoints: Path | None, vllm: Vllm
) -> dict[str, Any]:
    """What all figures depend on."""
    setting = {name: value for name, value in vars(work).items() if name != "routing"}
    if checkpoints:
        routings = {routing_of(match.shape, work) for match in matches} - {None}
        setting |= {"checkpoint": True, "routing": ", ".join(map(str, routings)) or None}
    return setting | ({"vllm": dict(vllm.engine_args)} if vllm.engine_args else {})


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


def _brief(done: Attempt) -> str:
    """One line per process."""
    one, speeds = done.process, {run.concurrency: round(run.speed or 0, 1) for run in done.runs}
    asked = [one.side, one.data, one.method, one.k, one.setting, one.draft_length]
    return json.dumps([*asked, one.seconds, speeds, one.failure])


if __name__ == "__main__":
    run(main)
