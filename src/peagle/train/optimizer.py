"""The optimizer: Muon for the layers' matrices, AdamW for the rest, over float32 weights."""

from typing import Any

import torch
from torch import Tensor, nn

from peagle.ops.linear import Linear
from peagle.ops.weight import dense
from peagle.train.product import SummedProduct
from peagle.train.recipe import Recipe

BETAS = 0.9, 0.95
"""AdamW's."""


class DraftOptimizer:
    """Both optimizers at one learning rate; their state is named by parameter, for the snapshot.

    Muon's updates are scaled to the size of AdamW's, so that one rate fits both. Parameters that
    compute in bfloat16 have a float32 master, to which every backward pass adds its gradient: once
    this exists, the model's linear layers do so themselves.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        masters = {name: _master(p) for name, p in trained.items()}
        self._names: dict[Tensor, str] = {master: name for name, master in masters.items()}
        pairs = [(master, trained[name]) for name, master in masters.items()]
        self._copies: dict[Tensor, Tensor] = {m: p for m, p in pairs if p is not m}
        self._summed = _sum_in_products(model, {p: m for m, p in pairs if p is not m})
        muon = recipe.optimizer == "muon"
        hidden = {m: None for name, m in masters.items() if muon and _is_hidden_matrix(name, m)}
        others = [master for master in masters.values() if master not in hidden]
        how: dict[str, Any] = {"lr": 0.0, "weight_decay": recipe.weight_decay}
        # fused, which has no form without values: others make copies as large as the parameters
        fused = not others[0].is_meta
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, betas=BETAS, fused=fused, **how)
        ]
        if hidden:
            self._parts.append(torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **how))

    def gradients(self) -> list[Tensor]:
        """Gradients of all masters, in float32; zero where no backward pass reached."""
        for master in self._names:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self._names if master.grad is not None]

    def step(self, learning_rate: float, clip: float) -> None:
        """Update the weights from their gradients, clipped to a norm, and clear the gradients."""
        self.gradients()
        nn.utils.clip_grad_norm_(self._names, clip)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
        self._publish()
        for master in self._names:
            if master not in self._summed:
                master.grad = None
        if self._summed:
            torch._foreach_zero_(list(self._summed.values()))

    def state(self) -> dict[str, Tensor]:
        """Masters as "parameter.master", and all other state as "parameter.key"."""
        states = [item for part in self._parts for item in part.state.items()]
        return {f"{name}.master": master.data for master, name in self._names.items()} | {
            f"{self._names[master]}.{key}": value
            for master, kept in states
            for key, value in kept.items()
        }

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned, in the model too."""
        for master, name in self._names.items():
            master.copy_(tensors.pop(f"{name}.master"))
        for part in self._parts:
            order = [self._names[p] for group in part.param_groups for p in group["params"]]
            kept = {i: _of(name, tensors) for i, name in enumerate(order)}
            part.load_state_dict({**part.state_dict(), "state": kept})
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Copy masters to the parameters that compute."""
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), list(self._copies))


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself where it is float32, else a copy that collects its gradients."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def collect(computing: Tensor) -> None:
        if computing.grad is None:
            assert master.grad is not None, "neither a product nor this hook received a gradient"
        elif master.grad is None:
            master.grad = computing.grad.float()
        else:
            master.grad.data += computing.grad
        computing.grad = None

    parameter.register_post_accumulate_grad_hook(collect)
    return master


def _sum_in_products(
    model: nn.Module, masters: dict[Tensor, nn.Parameter]
) -> dict[nn.Parameter, Tensor]:
    """Let linear layers add gradients to those of their weights' masters; returns these sums."""
    summed = {}
    for layer in model.modules():
        if not isinstance(layer, Linear) or layer.bias is not None:
            continue
        weight = dense(layer.weight)
        if weight in masters:
            master = masters[weight]
            assert layer.packed is None, "a model has one optimizer"
            assert master not in summed, "a weight is used by two layers"
            summed[master] = master.grad = torch.zeros_like(master)
            layer.packed = SummedProduct(weight, summed[master])
    return summed


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not name.startswith(("embed.", "readout."))


def _of(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
