"""Rows of a trained table, of which a batch reads few."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.transfer import to_device


def lookup(table: Tensor, rows: Tensor) -> Tensor:
    """`table[rows]`, with rows on the CPU; a float32 table gets its gradient in place.

    Torch's own gradient is another whole table for every use: for Qwen3-8B's embeddings 2.5 GB that
    are cleared, written and added.
    """
    if table.dtype != torch.float32 or not table.requires_grad:
        (there,) = to_device(table.device, rows)
        return F.embedding(there, table)
    different, which = to_device(table.device, *rows.unique(return_inverse=True))
    return F.embedding(which, _Rows.apply(table, different))


class _Rows(torch.autograd.Function):
    """Distinct rows of a table, so that adding to them does not depend on the order."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.table, ctx.rows = table, rows
        return table[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        if ctx.table.grad is None:
            ctx.table.grad = torch.zeros_like(ctx.table)
        ctx.table.grad.index_add_(0, ctx.rows, gradient)
        return None, None
