"""The log of a training run: its recipe, its figures and their curves, beside its output."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from peagle.cli.curves import draw_curves
from peagle.files import replacing, writing

if TYPE_CHECKING:
    from peagle.train.recipe import Recipe
    from peagle.train.trainer import Telemetry

METRICS, CURVES, RECIPE = "metrics.jsonl", "curves.png", "recipe.yaml"
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
