"""Resumable state of a run: weights, optimizer and progress, in safetensors, never pickled."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from peagle.errors import InputError


@dataclass
class Progress:
    """How far a run has come; all that is random in it follows from the seed and the step."""

    step: int = 0
    best_step: int = 0
    best_acceptance_length: float = 0.0


def save_snapshot(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, recipe: str
) -> None:
    """Write a snapshot in one rename, so that an interruption leaves the one before."""
    trained = _trained(model)
    names = list(trained)
    tensors = {f"model.{name}": p.detach() for name, p in trained.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{names[index]}.{key}": value for key, value in state.items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    scratch = path.with_suffix(".part")
    save_file(tensors, scratch, {"progress": json.dumps(vars(progress)), "recipe": recipe})
    os.replace(scratch, path)


def load_snapshot(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str
) -> Progress:
    """Put a snapshot back. Raises `InputError` when it belongs to another recipe or is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise InputError(
            f"{path} is no usable snapshot: {error}; remove it to start anew"
        ) from None
    if metadata.get("recipe") != recipe:
        raise InputError(
            f"{path} is from another recipe; change output, or remove it to start anew"
        )
    parameters = _trained(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"model.{name}"])
    state = {index: _state_of(name, tensors) for index, name in enumerate(parameters)}
    saved = {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict(saved)
    return Progress(**json.loads(metadata["progress"]))


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _state_of(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = f"optimizer.{name}."
    return {key.removeprefix(prefix): v for key, v in tensors.items() if key.startswith(prefix)}
