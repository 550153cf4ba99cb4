"""Attention in a training pass: under a closed-form mask, and dense parts that need none."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.train.mask import BLOCK, Visibility

Weighed = tuple[Tensor, Tensor]
"""Attention over some keys, [1, heads, queries, head_dim], and the log-sum-exp of its scores,
[1, heads, queries] in float32: enough to merge it with attention over other keys."""
Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, shaped as in `Masked`."""


class Masked:
    """Attention under a `Visibility`: FlexAttention on a GPU, tiles of queries on a CPU.

    On a GPU the numbers of queries and of keys must be multiples of `BLOCK`.
    """

    def __init__(self, visibility: Visibility, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._blocks = visibility.block_mask(device) if cuda else None
        self._tiles = [] if cuda else [*visibility.tiles()]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Weighed:
        """query: [1, heads, queries, head_dim]; key, value: [1, kv_heads, keys, head_dim]."""
        if self._blocks is None and not self._tiles:  # no query at all
            return _plain(query, key, value, None)
        if self._blocks is None:
            parts = [
                _plain(query[:, :, rows], key[:, :, keys], value[:, :, keys], seen)
                for rows, keys, seen in self._tiles
            ]
            outs, sums = zip(*parts, strict=True)
            return torch.cat(outs, dim=2), torch.cat(sums, dim=2)
        blocked = (part.unflatten(2, (-1, BLOCK)) for part in (query, key, value))
        return _compiled(_flex_attention)(*blocked, self._blocks)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one document to itself. Shapes as in `Masked`."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def merge(one: Weighed, other: Weighed) -> Tensor:
    """Merge the attention over two sets of keys, as if they were one set."""
    share = torch.sigmoid(one[1] - other[1])[..., None].to(one[0].dtype)
    return torch.lerp(other[0], one[0], share)


def add_dense(
    query: Tensor, rest: Weighed, rows: Sequence[slice], seen: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Merge `rest` with the attention of slices of queries over keys that they all see.

    This uses the fastest kernel: FlexAttention reaches about half the rate of cuDNN's attention on
    Hopper, and most of a long sequence's work is such rectangles, the context before an element's
    neighbourhood.

    rows: disjoint slices of the queries; seen: keys and values for each, shaped as in `Masked`.
    """
    return _AddDense.apply(query, *rest, rows, *(part for pair in seen for part in pair))


class _AddDense(torch.autograd.Function):
    """Needs no gradient of a dense part's log-sum: given the merged output and log-sum, a kernel's
    backward pass yields the gradient of its share of the merged softmax."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, rest: Tensor, rest_sum: Tensor, rows: list[slice], *seen: Tensor
    ) -> Tensor:
        merged = rest.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        total = rest_sum.clone()
        kept: list[Any] = []
        join = _compiled(_join) if query.is_cuda else _join
        for part, key, value in zip(rows, seen[::2], seen[1::2], strict=True):
            drawn, log_sum, seeds = _dense(query[..., part, :], key, value)
            join(merged[..., part, :], total[..., part], drawn, log_sum)
            kept.append(seeds)
        ctx.save_for_backward(query, merged, total, rest, rest_sum, *seen)
        ctx.rows, ctx.kept = rows, kept
        return merged

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, merged, total, rest, rest_sum, *seen = ctx.saved_tensors
        of_query, of_seen = torch.zeros_like(query), []
        for part, key, value, kept in zip(ctx.rows, seen[::2], seen[1::2], ctx.kept, strict=True):
            inputs, of_part = (query[..., part, :], key, value), gradient[..., part, :]
            drawn = merged[..., part, :], total[..., part].contiguous()
            of_query[..., part, :], *more = _dense_backward(of_part, inputs, drawn, kept)
            of_seen += more
        split = _compiled(_split) if query.is_cuda else _split
        return of_query, *split(gradient, merged, total, rest, rest_sum), None, *of_seen


def _join(merged: Tensor, total: Tensor, drawn: Tensor, log_sum: Tensor) -> None:
    """Merge (drawn, log_sum) into (merged, total), in place."""
    merged.copy_(merge((drawn, log_sum), (merged, total)))
    total.copy_(torch.logaddexp(total, log_sum))


def _split(
    gradient: Tensor, merged: Tensor, total: Tensor, rest: Tensor, rest_sum: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of `rest` and of its log-sum."""
    share = torch.exp(rest_sum - total)
    of_sum = share * ((rest - merged) * gradient).sum(-1, dtype=share.dtype)
    return gradient * share[..., None].to(gradient.dtype), of_sum


def _dense(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Any]:
    if query.device.type == "cpu":
        return *_plain(query, key, value, None), None
    out, log_sum, *kept, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True
    )
    return out, log_sum.view(out.shape[:-1]), kept


def _dense_backward(gradient: Tensor, inputs: Inputs, drawn: Weighed, kept: Any) -> Inputs:
    """The gradients of query, key and value."""
    if gradient.device.type == "cpu":
        return _plain_backward(gradient, inputs, drawn)
    (*sizes, seed, offset), (out, log_sum) = kept, drawn
    given = _row_major(gradient), *inputs, _row_major(out), log_sum[..., None]
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    return backward(*given, seed, offset, None, *sizes, 0.0, False)


def _row_major(heads: Tensor) -> Tensor:
    """The same values laid out in memory row by row, and head by head within a row.

    Slices of rows then have the strides of the whole. cuDNN caches plans by the strides of query,
    key and value alone: an output with another layout than when the plan was made is misread.
    """
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Weighed:
    scores = _scores(query, key)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    log_sum = scores.logsumexp(dim=-1)
    return torch.exp(scores - log_sum[..., None]) @ _per_head(value, query), log_sum


def _plain_backward(gradient: Tensor, inputs: Inputs, drawn: Weighed) -> Inputs:
    (query, key, value), (out, log_sum) = inputs, drawn
    shares = torch.exp(_scores(query, key) - log_sum[..., None])
    of_shares = gradient @ _per_head(value, query).mT
    of_scores = shares * (of_shares - (gradient * out).sum(-1, keepdim=True))
    of_scores = of_scores * query.shape[-1] ** -0.5
    of_key, of_value = of_scores.mT @ query, shares.mT @ gradient
    grouped = (key.shape[0], key.shape[1], -1, *key.shape[2:])
    of_query = of_scores @ _per_head(key, query)
    return of_query, of_key.view(grouped).sum(2), of_value.view(grouped).sum(2)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ _per_head(key, query).mT * query.shape[-1] ** -0.5


def _per_head(part: Tensor, query: Tensor) -> Tensor:
    """Keys or values repeated for each of the query heads that share them."""
    return part.repeat_interleave(query.shape[1] // part.shape[1], dim=1)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=True)


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Weighed:
    """Rows come in blocks, [1, heads, blocks, BLOCK, head_dim], so that the compiler knows that no
    block is partial, whatever their number: its backward kernel then takes 15 % less time."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    attended, aux = flex_attention(
        query.flatten(2, 3),
        key.flatten(2, 3),
        value.flatten(2, 3),
        block_mask=mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
    )
    assert aux.lse is not None
    return attended, aux.lse
