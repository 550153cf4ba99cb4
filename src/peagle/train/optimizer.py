"""The optimizer: Muon for the layers' matrices, AdamW for the rest, over float32 weights."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from peagle.ops.linear import Linear
from peagle.ops.weight import dense
from peagle.train.adamw import AdamW
from peagle.train.product import SummedProduct
from peagle.train.recipe import Recipe


class DraftOptimizer:
    """Both optimizers at one learning rate; their state is named by parameter, for the snapshot.

    Muon's updates are scaled to the size of AdamW's, so that one rate fits both. Parameters that
    compute in bfloat16 have a float32 master, to which every backward pass adds its gradient: once
    this exists, the model's linear layers do so themselves.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master(p) for name, p in self._trained.items()}
        pairs = [(master, self._trained[name]) for name, master in self._masters.items()]
        self._copies: dict[nn.Parameter, Tensor] = {m: p for m, p in pairs if p is not m}
        self._summed = _sum_in_products(model, {p: m for m, p in self._copies.items()})
        named = self._masters.items() if recipe.optimizer == "muon" else ()
        hidden = {master: None for name, master in named if _is_hidden_matrix(name, master)}
        others = [master for master in self._masters.values() if master not in hidden]
        decay = recipe.weight_decay
        self._adamw = AdamW(others, self._copies, decay)
        self._parts: list[torch.optim.Optimizer] = [self._adamw]
        self._muon: torch.optim.Muon | None = None
        if hidden:
            how = "match_rms_adamw"
            self._muon = torch.optim.Muon(hidden, lr=0.0, weight_decay=decay, adjust_lr_fn=how)
            self._parts.append(self._muon)

    def gradients(self) -> list[Tensor]:
        """Gradients of all masters, in float32; zero where no backward pass reached."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def step(self, learning_rate: float, clip: float) -> None:
        """Update the weights from their gradients, clipped to a norm, and clear the gradients."""
        gradients = self.gradients()
        scale = (clip / (torch.nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
        self._adamw.step(scale)
        if self._muon is not None:
            self._muon_step(self._muon, scale)
        for master in self._masters.values():
            if master not in self._summed:
                master.grad = None
        if self._summed:
            torch._foreach_zero_(list(self._summed.values()))

    def _muon_step(self, muon: torch.optim.Muon, scale: Tensor) -> None:
        masters = muon.param_groups[0]["params"]
        torch._foreach_mul_([master.grad for master in masters], scale)
        muon.step()
        self._publish(masters)

    def state(self) -> dict[str, Tensor]:
        """Masters as "parameter.master", and all other state as "parameter.key"."""
        kept = {f"{name}.master": master.data for name, master in self._masters.items()}
        for name, key, value in self._kept():
            kept[f"{name}.{key}"] = value
        return kept

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned, in the model too."""
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(tensors.pop(f"{name}.master"))
        names = {id(master): name for name, master in self._masters.items()}
        for part in self._parts:
            saved = part.state_dict()
            order = [names[id(p)] for group in part.param_groups for p in group["params"]]
            saved["state"] = {i: _of(name, tensors) for i, name in enumerate(order)}
            part.load_state_dict(saved)
        self._publish(self._masters.values())

    def _kept(self) -> Iterator[tuple[str, str, Tensor]]:
        names = {id(master): name for name, master in self._masters.items()}
        for part in self._parts:
            for master, kept in part.state.items():
                for key, value in kept.items():
                    yield names[id(master)], key, value

    @torch.no_grad()
    def _publish(self, masters: Iterable[nn.Parameter]) -> None:
        """Copy masters to the parameters that compute."""
        apart = [(self._copies[master], master) for master in masters if master in self._copies]
        if apart:
            torch._foreach_copy_([p for p, _ in apart], [master for _, master in apart])


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
