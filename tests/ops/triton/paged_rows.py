"""Requests in a paged cache, for the kernels that attend to it and their references."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from peagle.ops.cached_attention import PassRows, QKVSpec
from peagle.ops.rope import RopeConfig, rope_table

LENGTH, KV_HEADS, SIZE = 1100, 2, 16


def spec_of(num_heads: int = 4, head_dim: int = SIZE, **changes: object) -> QKVSpec:
    weight = torch.rand(2 * head_dim) + 0.5
    values = {"norm_weight": weight, "window": None, "sinks": None, **changes}
    table = rope_table(RopeConfig(), head_dim, LENGTH)
    return QKVSpec(num_heads, KV_HEADS, head_dim, rotations=table, eps=1e-6, **values)


def pass_rows(starts: list[int], counts: list[int], most: int) -> PassRows:
    """Requests with disjoint slots in no order; the last request's last row has none."""
    order = torch.randperm(len(starts) * LENGTH).view(len(starts), LENGTH)
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    spans = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
    writes = torch.cat([order[i, span] for i, span in enumerate(spans)])
    writes[-1] = -1
    limits = torch.full((len(starts),), LENGTH)
    limits[-1] = starts[-1] + counts[-1] - 1
    columns = (list(range(len(starts))), starts, firsts, counts)
    return PassRows(order, limits, *map(torch.tensor, columns), torch.cat(spans), writes, most)


def on(device: torch.device, value):  # type: ignore[no-untyped-def]
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{k: v.to(device) for k, v in given.items() if torch.is_tensor(v)})


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-4)
