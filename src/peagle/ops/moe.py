"""A mixture of experts: every row goes through the few MLPs that the router gives most weight."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.ops.packing import LeanModule
from peagle.ops.swiglu import geglu, swiglu
from peagle.ops.triton import Kernels
from peagle.ops.weight import Weight, multiply

EXPERTS = Kernels("moe", lambda fast, x, experts, *rest: fast.takes(experts))
"""Of ops whose second argument has the experts' weights."""
ALPHA = 1.702
"""In GPT-OSS's gate, x * sigmoid(ALPHA * x), near GELU (openai/gpt-oss, torch/model.py)."""


@dataclass(frozen=True)
class Clamped:
    """GPT-OSS's form of experts: biases on all products, and a clamped SwiGLU."""

    router: Tensor
    """[experts] bias"""
    gate_up: Tensor
    """[experts, 2 * inner] bias"""
    down: Tensor
    """[experts, hidden] bias"""
    limit: float
    """Upper bound of the gate; up is bounded on both sides."""


@dataclass(frozen=True)
class ExpertWeights:
    """A router, the experts that it chooses from, and how it does."""

    router: Tensor
    """[experts, hidden]"""
    gate_up: Weight
    """[experts, 2 * inner, hidden], gate before up"""
    down: Weight
    """[experts, hidden, inner]"""
    top_k: int
    normalize: bool
    clamped: Clamped | None = None
    batch_invariant: bool = False
    """Whether a kernel's result for a row must not depend on the number of rows, to the last
    bit."""
    factors: Tensor | None = None
    """[experts] what the router's weights are multiplied by; None: nothing."""

    @property
    def router_bias(self) -> Tensor | None:
        """[experts]"""
        return None if self.clamped is None else self.clamped.router


@EXPERTS.op
def moe(x: Tensor, weights: ExpertWeights) -> Tensor:
    """Rows through their experts' SwiGLU, weighed by the router and summed.

    x, result: [rows, hidden]. A row's sum runs in the order of its experts' numbers, whatever other
    rows there are.
    """
    how = weights.top_k, weights.normalize, weights.router_bias
    shares, experts = route(x, weights.router, *how)
    return _mixed(x, shares, experts, lambda expert, part: _through(expert, part, weights))


def _mixed(
    x: Tensor, weights: Tensor, experts: Tensor, through: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The weighed sum of what each row's experts make of it. through: (expert, its rows)."""
    result = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        rows, choices = (experts == expert).nonzero(as_tuple=True)
        result.index_add_(0, rows, through(expert, x[rows]) * weights[rows, choices, None])
    return result


def _through(expert: int, x: Tensor, weights: ExpertWeights) -> Tensor:
    """Rows through one expert, not weighed."""
    gate_up, down, clamped = weights.gate_up[expert], weights.down[expert], weights.clamped
    if clamped is None:
        return multiply(swiglu(multiply(x, gate_up)), down)
    gate, up = multiply(x, gate_up, clamped.gate_up[expert]).chunk(2, dim=-1)
    return multiply(clamped_swiglu(gate, up, clamped.limit), down, clamped.down[expert])


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """GPT-OSS's activation: the gate has no lower bound, and an up of 0 lets the gate pass."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def route(
    x: Tensor, router_weight: Tensor, top_k: int, normalize: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each row's most likely experts: weights in x's type and numbers, both [rows, top_k].

    The weights are float32 probabilities over all experts, those kept made to sum to 1 on request.
    Of experts equally likely, which are common in bfloat16, those with lower numbers come first.
    """
    probabilities = F.linear(x, router_weight, bias).softmax(dim=-1, dtype=torch.float32)
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, experts = ordered[:, :top_k], order[:, :top_k]
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(x.dtype), experts


class RoutedExperts(LeanModule):
    """A router, and the weights of the experts that it chooses from; called with rows alone, these
    are what the router reads.

    batch_invariant: as in `Linear`.
    """

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.gate_up: Weight = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down: Weight = nn.Parameter(torch.empty(experts, hidden, inner))
        self.top_k, self.batch_invariant = top_k, False

    def has_kernels(self) -> bool:
        """Whether Triton's kernels cover these weights, where they are."""
        return EXPERTS.chosen(self.router, self) is not None

    def warm_up(self, most_rows: int) -> None:
        """Compile a GPU's kernels now, which the first large pass would else stand still for."""
        if fast := EXPERTS.chosen(self.router, self):
            fast.warm_up(self, most_rows)


class Experts(RoutedExperts):
    """`moe` with its learned weights, by Triton kernels on a GPU. limit: makes it `Clamped`."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int,
        normalize: bool,
        limit: float | None = None,
    ) -> None:
        super().__init__(hidden, inner, experts, top_k)
        self.normalize, self.limit = normalize, limit
        if limit is not None:
            self.router_bias = nn.Parameter(torch.empty(experts))
            self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * inner))
            self.down_bias = nn.Parameter(torch.empty(experts, hidden))

    def forward(self, x: Tensor) -> Tensor:
        return moe(x, self.weights())

    def weights(self) -> ExpertWeights:
        """What `moe` takes after its rows."""
        clamped = None
        if self.limit is not None:
            biases = self.router_bias, self.gate_up_bias, self.down_bias
            clamped = Clamped(*biases, self.limit)
        given = self.router, self.gate_up, self.down, self.top_k, self.normalize
        return ExpertWeights(*given, clamped, self.batch_invariant)


class ScaledExperts(RoutedExperts):
    """Gemma 4's experts: the router reads the stream in a scale of its own, each expert has a
    factor, and the gate is GEGLU. By Triton kernels on a GPU."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int) -> None:
        super().__init__(hidden, inner, experts, top_k)
        self.router_scale = nn.Parameter(torch.empty(hidden))
        self.factors = nn.Parameter(torch.empty(experts))

    def forward(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """x, result: [rows, hidden]; routed: what the router reads before its scale, like x; None:
        x."""
        return self.summands(x, self.scaled(x if routed is None else routed)).sum(dim=1)

    def scaled(self, routed: Tensor) -> Tensor:
        """What the router multiplies: [rows, hidden] both."""
        return routed * self.router_scale * routed.shape[-1] ** -0.5

    def summands(self, x: Tensor, routed: Tensor) -> Tensor:
        """What the result is the sum of: [rows, summands, hidden]. routed: of `scaled`."""
        given = self.router, self.gate_up, self.down, self.top_k, True, None
        return summands(x, ExpertWeights(*given, self.batch_invariant, self.factors), routed)


@EXPERTS.op
def summands(x: Tensor, weights: ExpertWeights, routed: Tensor) -> Tensor:
    """As of `ScaledExperts`."""
    assert weights.factors is not None
    shares, experts = route(routed, weights.router, weights.top_k, weights.normalize)

    def through(expert: int, x: Tensor) -> Tensor:
        return multiply(geglu(multiply(x, weights.gate_up[expert])), weights.down[expert])

    return _mixed(x, shares * weights.factors[experts], experts, through)[:, None]
