"""Resumable state of a run: weights, optimizer and progress, in safetensors, never pickled."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.errors import InputError
from peagle.train.optimizer import DraftOptimizer


@dataclass
class Progress:
    """How far a run has come; all that is random in it follows from the seed and the step."""

    step: int = 0
    best_step: int = 0
    best_acceptance_length: float = 0.0


def save_snapshot(path: Path, optimizer: DraftOptimizer, progress: Progress, recipe: str) -> None:
    """Write a snapshot in one rename, so that an interruption leaves the one before."""
    kept: dict[str, Tensor] = optimizer.state()
    tensors = {name: value.detach().cpu().contiguous() for name, value in kept.items()}
    scratch = path.with_suffix(".part")
    save_file(tensors, scratch, {"progress": json.dumps(vars(progress)), "recipe": recipe})
    os.replace(scratch, path)


def load_snapshot(path: Path, optimizer: DraftOptimizer, recipe: str) -> Progress:
    """Put a snapshot back. Raises `InputError` when it belongs to another recipe or is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is no usable snapshot ({error}); remove it to start anew"
        ) from None
    if metadata.get("recipe") != recipe:
        raise InputError(
            f"{path} is from another recipe; change output, or remove it to start anew"
        )
    optimizer.restore(tensors)
    return Progress(**json.loads(metadata["progress"]))


def kept_step(path: Path) -> int | None:
    """The step that a run would go on from; None where there is no readable snapshot."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return int(json.loads(metadata["progress"])["step"])
    except (SafetensorError, OSError, KeyError, ValueError):
        return None
