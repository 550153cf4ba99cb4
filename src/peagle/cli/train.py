"""`peagle train`: from a target and text that it wrote to a drafter.

Examples:
  peagle train recipe.yaml --dry-run
  peagle train recipe.yaml --target ./target --drafter ./drafter --k 8
  peagle train recipe.yaml learning_rate=3e-4 steps=2000
"""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field
from rich.console import Console

from peagle.cli.groups import Flags
from peagle.cli.interrupts import INTERRUPTED
from peagle.cli.options import use_threads
from peagle.cli.progress import progress_bar
from peagle.cli.training_log import Tracking, TrainingLog, need
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.cli.engine_length import Prompts
    from peagle.train.estimate import Estimate
    from peagle.train.recipe import Recipe
    from peagle.train.snapshot import Progress
    from peagle.train.trainer import Telemetry, Trainer, Watch

LONG = 1e6
"""Seconds over which the remaining time is estimated: reports may be minutes apart."""


class Overrides(Flags):
    """Keys of the recipe that have flags."""

    target: str | None = None
    """Target model: directory or hub id. Default: the recipe's"""
    lora: str | None = None
    """LoRA adapter to merge into it. Default: the recipe's"""
    output: str | None = Field(None, alias="drafter")
    """Directory to write: output. Default: the recipe's"""
    num_speculative_tokens: int | None = Field(None, alias="k")
    """Tokens to train for: num_speculative_tokens. Default: the recipe's"""

    def beside(self, pairs: Sequence[str]) -> list[str]:
        """All as key=value. Raises `InputError` for a key that is given both ways."""
        given = {pair.partition("=")[0] for pair in pairs}
        values = self.model_dump(exclude_none=True)
        for key in values.keys() & given:
            raise InputError(f"{key} is given as a flag and as {key}=...; give it once")
        # as JSON, so that YAML reads text as text
        return [*pairs, *(f"{key}={json.dumps(value)}" for key, value in values.items())]


class RunFlags(Flags):
    """What is done besides training, or in its place."""

    dry_run: bool = False
    """Print what the run would do and need, and exit."""
    measure_url: str | None = None
    """A vLLM that serves the target with the drafter and nobody else: measure AL there at the end,
    or of a finished drafter at once. Default: this engine, for a target that it runs"""


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe: target, data, output, method ...")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value pairs that override the recipe's.")
    ] = None,
    *,
    flags: Overrides,
    run: RunFlags,
    tracking: Tracking,
) -> None:
    """Train a drafter.

    The best one so far is always in the recipe's output directory. OUTPUT.run beside it holds
    figures and curves. The same command continues a stopped run.
    """
    from peagle.cli.dry_run import print_plan
    from peagle.train.recipe import Recipe
    from peagle.train.snapshot import is_finished

    given, url = Recipe.load(recipe, flags.beside(overrides or [])), run.measure_url
    if url is not None:
        from peagle.server_url import server_url

        server_url(url)  # before hours of training
    finished = url is not None and is_finished(Path(given.output))
    if run.dry_run:
        print_plan(given)
    elif os.environ.get("RANK", "0") == "0":  # torchrun's; only the first rank prints
        (_measure if finished else _train)(given, tracking, url)
    elif not finished:
        _help_training(given)


def _help_training(recipe: "Recipe") -> None:
    from peagle.train.prepare import prepare

    trainer = prepare(recipe)
    with _stopping(trainer):
        trainer.run(lambda _: None)


def _measure(recipe: "Recipe", tracking: Tracking, url: str | None) -> None:
    """Measure a drafter whose training is over, since a server can serve it only now."""
    from peagle.cli.engine_length import held_out_prompts
    from peagle.train.prepare import Preflight

    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    prompts = held_out_prompts(Preflight.of(recipe, dry_run=True).validation)
    with tracking.open(recipe, recipe.steps) as log:
        if not _check_estimate(None, prompts, log, console, url):
            raise typer.Exit(1)


def _train(recipe: "Recipe", tracking: Tracking, url: str | None) -> None:
    """Train, and say how it ended."""
    from peagle.cli.engine_length import held_out_prompts
    from peagle.device import resolve_device
    from peagle.train.prepare import prepare

    need("matplotlib", "peagle train")
    tracking.check()
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    trainer = prepare(recipe, lambda told: console.print(str(told)))
    if resolve_device(recipe.device).type == "cuda":
        # the host's masks gain nothing from more, which wait for each other on a busy machine
        use_threads(1)
    start = _kept_step(recipe) or 0
    if start:
        console.print(f"goes on from the snapshot at step {start}")
    with tracking.open(recipe, start) as log:
        ended = _run(trainer, log, console, start)
        if ended is None or ended.step < recipe.steps:
            console.print(_next(_kept_step(recipe)))
            raise typer.Exit(INTERRUPTED)
        length, step = ended.best_acceptance_length, ended.best_step
        console.print(f"{recipe.output}: best estimated AL {length:.3f} at step {step}")
        prompts = held_out_prompts(trainer.validation)
        del trainer  # frees its target to make room for the engine's
        _check_estimate(length, prompts, log, console, url)


def _run(trainer: "Trainer", log: TrainingLog, console: Console, start: int) -> "Progress | None":
    """Run with a bar; None if interrupted."""
    try:
        with showing_reports(console, trainer.recipe.steps, start) as show, _stopping(trainer):

            def watch(report: "Telemetry") -> None:
                log.add(report)
                show(report)

            return trainer.run(watch)
    except KeyboardInterrupt:
        return None


def _check_estimate(
    estimated: float | None, prompts: "Prompts", log: TrainingLog, console: Console, url: str | None
) -> bool:
    """Show and log the AL of the best drafter in the engine, or at a server, or why there is none;
    then judge it. Of a target that the engine does not run, its estimate is judged, if any.

    Returns whether it was measured.
    """
    from peagle.cli.engine_length import TOKENS, measure_engine, measure_server
    from peagle.cli.verdict import judge, judge_served
    from peagle.drafters.diagnosis import foreign_facts
    from peagle.models.weights import model_directory

    recipe, foreign = log.recipe, foreign_facts(model_directory(log.recipe.target))
    by = "the server's" if url else "the engine's"
    try:
        if foreign and url is None:
            raise InputError(foreign["target"])
        if not prompts:
            raise InputError("no held-out conversation has a prompt")
        measured = measure_server(url, prompts) if url else measure_engine(recipe, prompts)
    except InputError as error:
        console.print(f"{by} AL was not measured: {error}")
        if estimated and (foreign or url):
            console.print(str(judge_served(recipe, estimated, None)), markup=False)
        return False
    how = f"{len(prompts)} held-out prompts, greedy, {TOKENS} tokens at most"
    console.print(f"{by} AL {measured:.3f} ({how})")
    log.add_engine(recipe.steps, measured)
    judged = judge_served if url else judge
    console.print(str(judged(recipe, estimated or measured, measured)), markup=False)
    return True


def _kept_step(recipe: "Recipe") -> int | None:
    from peagle.train.snapshot import kept_step, snapshot_path

    return kept_step(snapshot_path(Path(recipe.output)))


def _next(step: int | None) -> str:
    if step is None:
        return "no snapshot yet: the same command starts over"
    return f"the same command continues from the snapshot at step {step}"


@contextmanager
def showing_reports(console: Console, steps: int, start: int) -> "Iterator[Watch]":
    """A bar, and a line for each evaluation; call the value with each report."""
    length = "-"
    with progress_bar(console, "steps", steps, start, speed_estimate_period=LONG) as update:

        def show(report: "Telemetry") -> None:
            nonlocal length
            if report.estimate is not None:
                length = f"{report.estimate.acceptance_length:.3f}"
                console.print(_evaluation(report, report.estimate))
            told = f"loss {report.loss:.4f}  AL {length}"
            update(completed=report.step, description=told)

        yield show


def _evaluation(report: "Telemetry", estimate: "Estimate") -> str:
    rates = " ".join(f"{share:.3f}" for share in estimate.accuracy)
    return (
        f"step {report.step}  loss {report.loss:.4f}  AL {estimate.acceptance_length:.3f}"
        f" ({estimate.drawn_acceptance_length:.3f} at temperature 1)"
        f"  accuracy per depth {rates}{'  best' if report.best else ''}"
    )


@contextmanager
def _stopping(trainer: "Trainer") -> Iterator[None]:
    """SIGINT and SIGTERM end the run after its step, with a snapshot; a second signal at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: object) -> None:
        trainer.stop()
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
