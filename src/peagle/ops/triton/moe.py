"""A mixture of experts: route (one launch, three for many rows), gate and up, down, sum and norm.

A *pair* is one row at one of its experts: row * top_k + choice. Pairs are ordered by expert and cut
into *blocks* of pairs of one expert; a program multiplies one block by a strip of that expert's
weight. How many blocks there are is known on the device alone: a launch has programs for as many as
there could be, and those too many return at once. So nothing waits for the host, shapes depend on
the number of rows only, and a CUDA graph can hold it all.
"""

import torch
from torch import Tensor

from peagle.ops.moe import ALPHA, Experts, ExpertWeights, RoutedExperts
from peagle.ops.norm import RMSNorm
from peagle.ops.products.normed import Normed
from peagle.ops.residual import Beside
from peagle.ops.triton import experts as products
from peagle.ops.triton.expert_blocks import Gates
from peagle.ops.triton.norm import add_normed
from peagle.ops.triton.routing import route
from peagle.ops.weight import QuantizedWeight

MOST_PAIRS = ((8, 16), (16, 32), (64, 64))
"""Pairs of an expert, and the pairs of a block for up to so many; for more it has `LARGEST`."""
LARGEST = 128


def takes(experts: ExpertWeights | RoutedExperts) -> bool:
    """Whether these kernels cover experts' weights on their device."""
    return products.takes(experts.gate_up) and products.takes(experts.down)


def moe(x: Tensor, weights: ExpertWeights) -> Tensor:
    """The same as `peagle.ops.moe.moe`, with every sum taken in float32.

    x, result: [rows, hidden] in bfloat16, float16 or float32. The weights must be contiguous.
    """
    given = Normed(x.contiguous(), None, 0.0)
    return _outputs(given, given, weights).sum(dim=1)


def summands(x: Tensor, weights: ExpertWeights, routed: Tensor) -> Tensor:
    """As the reference: [rows, top_k, hidden]."""
    given, read = (Normed(rows.contiguous(), None, 0.0) for rows in (x, routed))
    return _outputs(given, read, weights, gelu=True)


def add_mixture(
    x: Normed, experts: Experts, stream: Tensor, norm: RMSNorm, beside: Beside | None = None
) -> tuple[Tensor, Normed]:
    """As the reference."""
    return add_normed(_outputs(x, x, experts.weights()), stream, norm, beside)


def _outputs(x: Normed, routed: Normed, weights: ExpertWeights, gelu: bool = False) -> Tensor:
    """What every pair's expert makes of it, weighed: [rows, top_k, hidden].

    routed: what the router reads, x or its like; gelu: GEGLU, not SwiGLU.
    """
    gate_up, down, clamped = weights.gate_up, weights.down, weights.clamped
    pairs, (experts, hidden, inner) = len(x.x) * weights.top_k, down.shape
    # a row's sums depend on the tile that it is in: where they must not, there is but one
    block = block_for(0.0 if weights.batch_invariant else pairs / experts, x.x.dtype)
    activated, outputs = x.x.new_empty(pairs, inner), x.x.new_empty(pairs, hidden)
    if isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight):
        block = min(block, products.LARGEST_BLOCK)
    routing = route(routed, weights, block)
    limit = 0.0 if clamped is None else clamped.limit
    gates = Gates(weights.top_k, limit, ALPHA, gelu)
    of_gate_up, of_down = (None, None) if clamped is None else (clamped.gate_up, clamped.down)
    products.gate_up(x.x, gate_up, of_gate_up, routing, gates, activated)
    products.down(activated, down, of_down, routing, outputs)
    return outputs.view(len(x.x), weights.top_k, hidden)


def block_for(pairs_an_expert: float, dtype: torch.dtype) -> int:
    """Most pairs in a block for so many if all experts were chosen equally often.

    With few, reading weights takes all the time: tiles are thin, so that many are under way. With
    many the tensor cores take it: tiles are large, so that each read serves often.
    """
    # exact float32 products run outside the tensor cores, where large tiles outgrow the registers
    if dtype == torch.float32:
        return MOST_PAIRS[0][1]
    return next((block for most, block in MOST_PAIRS if pairs_an_expert <= most), LARGEST)


def warm_up(experts: RoutedExperts, most_rows: int) -> None:
    """Compile what passes of up to `most_rows` rows need, whatever the size of their tiles."""
    count, hidden = experts.router.shape
    for pairs_an_expert, _ in MOST_PAIRS:
        rows = pairs_an_expert * count // experts.top_k + 1
        if rows <= most_rows:
            experts(experts.router.new_zeros(rows, hidden))
