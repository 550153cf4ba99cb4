"""A mixture of experts: every row goes through the few MLPs that its router gives most weight."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.ops.packing import Part
from peagle.ops.triton import kernels, serve

Mixture = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
"""What `moe` is, in torch or in Triton."""


def moe(
    x: Tensor, router_weight: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalize: bool
) -> Tensor:
    """Rows through their experts' SwiGLU, weighed by the router and summed.

    x, result: [rows, hidden]; router_weight: [experts, hidden]; gate_up: [experts, 2 * inner,
    hidden], gate before up; down: [experts, hidden, inner]. A row's sum runs in the order of its
    experts' numbers, whatever other rows there are.
    """
    weights, experts = route(x, router_weight, top_k, normalize)
    result = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        rows, choices = (experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        output = F.linear(F.silu(gate) * up, down[expert])
        result.index_add_(0, rows, output * weights[rows, choices, None])
    return result


def route(x: Tensor, router_weight: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Each row's most likely experts: weights in x's type and numbers, both [rows, top_k].

    The weights are float32 probabilities over all experts, those kept made to sum to 1 on request.
    Of experts equally likely, which are common in bfloat16, those with lower numbers come first.
    """
    probabilities = F.linear(x, router_weight).softmax(dim=-1, dtype=torch.float32)
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, experts = ordered[:, :top_k], order[:, :top_k]
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(x.dtype), experts


class Experts(Part):
    """`moe` with its learned weights, by Triton kernels on a GPU."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int, normalize: bool) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))
        self.top_k, self.normalize = top_k, normalize

    def forward(self, x: Tensor) -> Tensor:
        mixture: Mixture = kernels("moe").moe if serve(x) else moe
        return mixture(x, self.router, self.gate_up, self.down, self.top_k, self.normalize)
