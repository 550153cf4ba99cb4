"""Resumable state of a run: weights, optimizer and progress, in safetensors, never pickled."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle.errors import InputError
from peagle.files import replacing
from peagle.models.weights import opened
from peagle.train.digest import digest
from peagle.train.optimizer import DraftOptimizer
from peagle.train.packing import PackedRows
from peagle.train.recipe import Recipe

SNAPSHOT = "snapshot.safetensors"
"""What follows the output's name."""
START_OVER = "remove it to start over"


@dataclass
class Progress:
    """How far a run has come; all of its randomness follows from the seed and the step."""

    step: int = 0
    best_step: int = 0
    best_acceptance_length: float = 0.0


def snapshot_path(output: Path) -> Path:
    """Where a run that writes its drafter to `output` keeps its state."""
    return output.with_name(f"{output.name}.{SNAPSHOT}")


def is_finished(output: Path) -> bool:
    """Whether an output holds a drafter whose training is over."""
    return not snapshot_path(output).exists() and (output / "model.safetensors").exists()


def origin_of(
    recipe: Recipe, training: PackedRows, validation: PackedRows, target: Mapping[str, str]
) -> dict[str, str]:
    """What a run depends on, keyed by the words an error uses for a mismatch.

    target: its fingerprint; empty where that is not compared.
    """
    return {
        "another recipe": recipe.model_dump_json(exclude_defaults=True, exclude={"shard_target"}),
        "other data": f"{training.digest} {validation.digest}",
        **{f"other {part}": value for part, value in target.items()},
    }


def save_snapshot(
    path: Path, optimizer: DraftOptimizer, progress: Progress, origin: Mapping[str, str]
) -> None:
    """Write a snapshot in one rename, so that an interruption leaves the previous one."""
    kept: dict[str, Tensor] = optimizer.state()
    tensors = {name: value.detach().cpu().contiguous() for name, value in kept.items()}
    said = json.dumps(vars(progress))
    with replacing(path) as scratch:
        save_file(tensors, scratch, {"progress": said, "sum": _sum(said, tensors), **origin})


def load_snapshot(path: Path, optimizer: DraftOptimizer, origin: Mapping[str, str]) -> Progress:
    """Restore a snapshot. Raises `InputError` as `check_snapshot` does, or for a wrong checksum."""
    check_snapshot(path, origin)
    with opened(path, START_OVER) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    said = metadata.get("progress", "")
    if metadata.get("sum") != _sum(said, tensors):
        raise InputError(f"{path} is damaged: its checksum is another; {START_OVER}")
    optimizer.restore(tensors)
    return Progress(**json.loads(said))


def _sum(said: str, tensors: Mapping[str, Tensor]) -> str:
    """A checksum of a snapshot's progress and tensors."""
    flat = (tensors[name].flatten().view(torch.uint8).numpy() for name in sorted(tensors))
    return digest([said.encode(), *(part.data for part in flat)])


def check_snapshot(path: Path, origin: Mapping[str, str]) -> None:
    """Raise `InputError` when a snapshot has another origin or is damaged."""
    with opened(path, START_OVER) as file:
        metadata = file.metadata() or {}
    for what, value in origin.items():
        if metadata.get(what) != value:
            raise InputError(
                f"{path} is from {what}{_difference(metadata.get(what), value)}; go back to that, "
                "change output, or remove the snapshot to start over"
            )


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
        with opened(path) as file:
            metadata = file.metadata() or {}
        return int(json.loads(metadata["progress"])["step"])
    except (InputError, KeyError, ValueError):
        return None
