"""The log of a training run: its recipe, its figures and their curves, beside its output; and the
trackers to which it can report, TensorBoard, and Weights & Biases."""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from peagle.cli.curves import draw_curves
from peagle.cli.groups import Flags
from peagle.errors import InputError, lacking
from peagle.files import replacing, writing

if TYPE_CHECKING:
    from peagle.train.recipe import Recipe
    from peagle.train.trainer import Telemetry

METRICS, CURVES, RECIPE = "metrics.jsonl", "curves.png", "recipe.yaml"
RUN_ID = "wandb-id"
"""File with the run's id at Weights & Biases, so that it can be continued."""
Entry = dict[str, Any]
"""A line of `metrics.jsonl`: a report, or the engine's measurement at the end."""
Tracker = Callable[[Entry], None]
"""Receives every entry as well."""


def log_directory(recipe: "Recipe") -> Path:
    """OUTPUT.run, beside the recipe's output. Raises `InputError` when it cannot be made."""
    output = Path(recipe.output)
    directory = output.with_name(output.name + ".run")
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


class TrainingLog:
    """Writes what is reported; on resume, after the entries up to the step it continues from."""

    def __init__(self, recipe: "Recipe", step: int, trackers: Sequence[Tracker] = ()) -> None:
        self.recipe, self._trackers = recipe, trackers
        self._directory = log_directory(recipe)
        self._metrics = self._directory / METRICS
        self._entries = [entry for entry in _read(self._metrics) if entry["step"] <= step]
        self._before = self._entries[-1]["seconds"] if self._entries else 0.0
        self._start, self._begun = time.perf_counter(), False

    def add(self, report: "Telemetry") -> None:
        """Write a report; after an evaluation, draw the curves again.

        Raises `InputError` when the disk is full.
        """
        entry = self._entry(report)
        with self._writing():
            if not self._begun:
                self._begin()
            self._entries.append(entry)
            self._write(entry)
            if report.estimate is not None:
                draw_curves(self._entries, self.recipe.loss, self._directory / CURVES)

    def add_engine(self, step: int, length: float) -> None:
        """Write the engine's acceptance length of the best drafter, at the end; raises as `add`."""
        with self._writing():
            self._write({"step": step, "engine_acceptance_length": length, **self._now()})

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self._directory, "make room, and the same command goes on")

    def _write(self, entry: Entry) -> None:
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(_line(entry))
        for track in self._trackers:
            track(entry)

    def _begin(self) -> None:
        """Replace an earlier run's files, only once this run has something to write."""
        self._begun = True
        _replace(self._metrics, "".join(map(_line, self._entries)))
        text = yaml.safe_dump(self.recipe.model_dump(mode="json"), sort_keys=False)
        _replace(self._directory / RECIPE, text)

    def _entry(self, report: "Telemetry") -> Entry:
        from peagle.train.estimate import Estimate
        from peagle.train.trainer import rate

        recipe, figures = self.recipe, [figure.name for figure in fields(Estimate)]
        return {
            "step": report.step,
            "loss": report.loss,
            "learning_rate": recipe.learning_rate * rate(recipe, report.step - 1),
            **(vars(report.estimate) if report.estimate else dict.fromkeys(figures)),
            "best": report.best,
            **self._now(),
        }

    def _now(self) -> Entry:
        return {
            "seconds": round(self._before + time.perf_counter() - self._start, 3),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def scalars(entry: Entry) -> dict[str, float]:
    """An entry's figures by name, one for each depth, without the step and the times."""
    lengths = ("acceptance_length", "drawn_acceptance_length", "engine_acceptance_length")
    names = ("loss", "learning_rate", *lengths)
    found = {name: entry[name] for name in names if entry.get(name) is not None}
    for name in ("accuracy", "drawn_accuracy"):
        shares = enumerate(entry.get(name) or ())
        found |= {f"{name}/depth_{depth}": share for depth, share in shares}
    return found


def _read(path: Path) -> list[Entry]:
    """The entries of a file, up to one that an interruption left unfinished."""
    entries: list[Entry] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return entries


def _line(entry: Entry) -> str:
    return json.dumps(entry) + "\n"


def _replace(path: Path, text: str) -> None:
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


class Tracking(Flags):
    """The trackers that a run reports to."""

    tensorboard: bool = False
    """Also write event files for TensorBoard."""
    wandb: str | None = None
    """Weights & Biases project to log to."""

    def check(self) -> None:
        """Raise `InputError` when a library is missing, before anything is loaded."""
        if self.tensorboard:
            need("tensorboard", "--tensorboard")
        if self.wandb is not None:
            need("wandb", "--wandb", ours=False)

    @contextmanager
    def open(self, recipe: "Recipe", step: int) -> Iterator[TrainingLog]:
        """The log of a run that starts after `step`, which the trackers receive as well."""
        directory, trackers = log_directory(recipe), []
        with ExitStack() as stack:
            if self.tensorboard:
                trackers.append(stack.enter_context(_tensorboard(directory, step)))
            if self.wandb is not None:
                run = _wandb(self.wandb, directory, recipe, step)
                trackers.append(stack.enter_context(run))
            yield TrainingLog(recipe, step, trackers)


def need(module: str, what: str, ours: bool = True) -> None:
    """Raise `InputError` when a library is not installed; `ours` is one of the extra `train`."""
    found = find_spec(module)
    if found is None or found.origin is None:  # a directory ./wandb is not the library
        lack = f"{what} needs {module}"
        raise InputError(lacking(lack, "train") if ours else f"{lack}; pip install {module}")


@contextmanager
def _tensorboard(directory: Path, step: int) -> Iterator[Tracker]:
    """Event files; entries past `step`, from a run that was lost, are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory), purge_step=step + 1, flush_secs=10) as writer:

        def track(entry: Entry) -> None:
            for name, value in scalars(entry).items():
                writer.add_scalar(name, value, entry["step"])

        yield track


@contextmanager
def _wandb(project: str, directory: Path, recipe: "Recipe", step: int) -> Iterator[Tracker]:
    import wandb

    try:
        run = wandb.init(
            project=project,
            name=Path(recipe.output).name,
            dir=directory,
            config=recipe.model_dump(),
            id=_run_id(directory / RUN_ID, fresh=step == 0),
            resume="allow",
        )
    except wandb.Error as error:
        raise InputError(f"--wandb {project}: {error}") from None
    with run:
        yield lambda entry: run.log(scalars(entry), step=entry["step"])


def _run_id(path: Path, fresh: bool) -> str:
    """The id in the file `path`; a new one for a fresh run."""
    if fresh or not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")
