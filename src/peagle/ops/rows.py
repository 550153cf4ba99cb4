"""Some rows of a batch, none of them twice."""

from typing import Any

import torch
from torch import Tensor


def take(x: Tensor, rows: Tensor | None) -> Tensor:
    """`x[rows]`, or everything; rows: [taken], each at most once."""
    return x if rows is None else _take(x, rows)


# As an operator: torch's own gradient, and its compiler's, adds up rows that come twice.
@torch.library.custom_op("peagle::take", mutates_args=())
def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


@_take.register_fake
def _(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(rows.shape[0], *x.shape[1:])


@torch.library.custom_op("peagle::put", mutates_args=())
def _put(taken: Tensor, rows: Tensor, count: int) -> Tensor:
    """Rows in their places among `count`, the others zero."""
    return taken.new_zeros(count, *taken.shape[1:]).index_copy_(0, rows, taken)


@_put.register_fake
def _(taken: Tensor, rows: Tensor, count: int) -> Tensor:
    return taken.new_empty(count, *taken.shape[1:])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.count = inputs[0].shape[0]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (rows,) = ctx.saved_tensors
    return _put(gradient.contiguous(), rows, ctx.count), None


_take.register_autograd(_backward, setup_context=_keep)
