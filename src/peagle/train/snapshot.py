"""Resumable state of a run: weights, optimizer and progress, in safetensors, never pickled."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.errors import InputError
from peagle.files import replacing
from peagle.train.optimizer import DraftOptimizer
from peagle.train.packing import PackedRows
from peagle.train.recipe import Recipe

SNAPSHOT = "snapshot.safetensors"
"""What follows the output's name."""


@dataclass
class Progress:
    """How far a run has come; all of its randomness follows from the seed and the step."""

    step: int = 0
    best_step: int = 0
    best_acceptance_length: float = 0.0


def snapshot_path(output: Path) -> Path:
    """Where a run that writes its drafter to `output` keeps its state."""
    return output.with_name(f"{output.name}.{SNAPSHOT}")


def origin_of(recipe: Recipe, training: PackedRows, validation: PackedRows) -> dict[str, str]:
    """What a run depends on, keyed by the words an error uses for a mismatch."""
    return {
        "another recipe": recipe.model_dump_json(exclude_defaults=True, exclude={"shard_target"}),
        "other data": f"{training.digest} {validation.digest}",
    }


def save_snapshot(
    path: Path, optimizer: DraftOptimizer, progress: Progress, origin: Mapping[str, str]
) -> None:
    """Write a snapshot in one rename, so that an interruption leaves the previous one."""
    kept: dict[str, Tensor] = optimizer.state()
    tensors = {name: value.detach().cpu().contiguous() for name, value in kept.items()}
    with replacing(path) as scratch:
        save_file(tensors, scratch, {"progress": json.dumps(vars(progress)), **origin})


def load_snapshot(path: Path, optimizer: DraftOptimizer, origin: Mapping[str, str]) -> Progress:
    """Restore a snapshot. Raises `InputError` as `check_snapshot` does."""
    check_snapshot(path, origin)
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        progress = Progress(**json.loads(file.metadata()["progress"]))
    optimizer.restore(tensors)
    return progress


def check_snapshot(path: Path, origin: Mapping[str, str]) -> None:
    """Raise `InputError` when a snapshot has another origin or is damaged."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
    for what, value in origin.items():
        if metadata.get(what) != value:
            raise InputError(
                f"{path} is from {what}{_difference(metadata.get(what), value)}; go back to that, "
                "change output, or remove the snapshot to start over"
            )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is not a usable snapshot ({error}); remove it to start over"
        ) from None


def _difference(before: str | None, now: str) -> str:
    """Which values have changed, where both are JSON objects."""
    try:
        old, new = json.loads(before or ""), json.loads(now)
    except ValueError:
        return ""
    unset = "the default"
    changed = [key for key in {**old, **new} if old.get(key, unset) != new.get(key, unset)]
    words = (f"{key} was {old.get(key, unset)}, is {new.get(key, unset)}" for key in changed)
    return f" ({'; '.join(words)})"


def kept_step(path: Path) -> int | None:
    """The step that a run would resume from; None if there is no readable snapshot."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return int(json.loads(metadata["progress"])["step"])
    except (SafetensorError, OSError, KeyError, ValueError):
        return None
