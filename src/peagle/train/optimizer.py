"""The optimizer: Muon for the layers' matrices, AdamW for everything else, behind one interface."""

import torch
from torch import Tensor, nn

from peagle.train.recipe import Recipe


class DraftOptimizer:
    """Both optimizers at one learning rate; their state by parameter name, for the snapshot.

    Muon's updates are scaled to AdamW's size, so that one rate fits both.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, fused: bool) -> None:
        self._names: dict[Tensor, str] = {
            p: name for name, p in model.named_parameters() if p.requires_grad
        }
        hidden = [p for p, name in self._names.items() if _is_hidden_matrix(name, p)]
        chosen = set(hidden if recipe.optimizer == "muon" else ())
        others = [p for p in self._names if p not in chosen]
        adamw = torch.optim.AdamW(
            others, lr=0.0, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=fused
        )
        self._parts: list[torch.optim.Optimizer] = [adamw]
        if chosen:
            muon = torch.optim.Muon(
                hidden, lr=0.0, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append(muon)

    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients, and clear those."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Everything kept between steps, as "parameter.key"."""
        return {
            f"{self._names[parameter]}.{key}": value
            for part in self._parts
            for parameter, kept in part.state.items()
            for key, value in kept.items()
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
        for part in self._parts:
            saved = part.state_dict()
            order = [p for group in part.param_groups for p in group["params"]]
            names = (self._names[parameter] for parameter in order)
            saved["state"] = {i: _of(name, tensors) for i, name in enumerate(names)}
            part.load_state_dict(saved)


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not name.startswith(("embed.", "head."))


def _of(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
