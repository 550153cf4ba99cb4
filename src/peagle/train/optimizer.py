"""The optimizer: Muon for the layers' matrices, AdamW for everything else, over float32 weights."""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from peagle.train.recipe import Recipe


class DraftOptimizer:
    """Both optimizers at one learning rate; their state by parameter name, for the snapshot.

    Muon's updates are scaled to AdamW's size, so that one rate fits both. Parameters that compute
    in bfloat16 have a float32 master, to which every backward pass adds its gradient.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master(p) for name, p in self._trained.items()}
        hidden = [p for name, p in self._masters.items() if _is_hidden_matrix(name, p)]
        chosen = set(hidden if recipe.optimizer == "muon" else ())
        others = [p for p in self._masters.values() if p not in chosen]
        adamw = torch.optim.AdamW(
            others,
            lr=0.0,
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
            fused=others[0].is_cuda,
        )
        self._parts: list[torch.optim.Optimizer] = [adamw]
        if chosen:
            muon = torch.optim.Muon(
                hidden, lr=0.0, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append(muon)

    def gradients(self) -> list[Tensor]:
        """Of every master, in float32; zero where no backward pass came by."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def step(self, learning_rate: float, clip: float) -> None:
        """Update the weights from their gradients, clipped to a norm, and clear those."""
        masters = self._masters.values()
        torch.nn.utils.clip_grad_norm_(masters, clip)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
            part.zero_grad(set_to_none=True)
        self._publish()

    def state(self) -> dict[str, Tensor]:
        """Masters as "parameter.master" and everything kept between steps as "parameter.key"."""
        kept = {f"{name}.master": master.data for name, master in self._masters.items()}
        for name, key, value in self._kept():
            kept[f"{name}.{key}"] = value
        return kept

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state` gave, in the model too."""
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(tensors.pop(f"{name}.master"))
        names = {id(master): name for name, master in self._masters.items()}
        for part in self._parts:
            saved = part.state_dict()
            order = [names[id(p)] for group in part.param_groups for p in group["params"]]
            saved["state"] = {i: _of(name, tensors) for i, name in enumerate(order)}
            part.load_state_dict(saved)
        self._publish()

    def _kept(self) -> Iterator[tuple[str, str, Tensor]]:
        names = {id(master): name for name, master in self._masters.items()}
        for part in self._parts:
            for master, kept in part.state.items():
                for key, value in kept.items():
                    yield names[id(master)], key, value

    @torch.no_grad()
    def _publish(self) -> None:
        """Copy the masters to the parameters that compute."""
        pairs = [(p, self._masters[name]) for name, p in self._trained.items()]
        apart = [(p, master) for p, master in pairs if p is not master]
        if apart:
            torch._foreach_copy_([p for p, _ in apart], [master for _, master in apart])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself where it is float32, else a copy that collects its gradients."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())
    accumulate = _compiled_add() if parameter.is_cuda else _add

    def collect(computing: Tensor) -> None:
        assert computing.grad is not None
        if master.grad is None:
            master.grad = computing.grad.float()
        else:
            accumulate(master.grad, computing.grad)
        computing.grad = None

    parameter.register_post_accumulate_grad_hook(collect)
    return master


def _add(total: Tensor, more: Tensor) -> None:
    total.view(-1).add_(more.view(-1))


@cache
def _compiled_add() -> Callable[[Tensor, Tensor], None]:
    """Torch's own kernel for a sum of two dtypes reaches three quarters of the memory's rate."""
    return torch.compile(_add, dynamic=True)


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not name.startswith(("embed.", "head."))


def _of(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
