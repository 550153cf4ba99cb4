"""The gated delta rule: a recurrence over positions, whose state no draft changes before it is
accepted.

A pass stores the state behind the last row that is sure, a known token's, and keeps the inputs of
the drafts after it. The next pass begins with those that were accepted meanwhile.

```
 kept             w w w d1 d2 d3        inputs of the rows before the drafts, and of the drafts
 accepted               d1 d2           replayed, by the same operations as any row
 the pass                      n d d d  the newest token, drafts
 state                         ^        stored behind it
```

So nothing is rolled back, and a state has the same bits whatever was drafted. Source: Gated Delta
Networks (arXiv 2412.06464), as transformers has Qwen3.5's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.ops.triton import in_kernels

LENGTH_EPS = 1e-6
"""The number added to the squared length of queries and keys before they get length one."""


@dataclass(frozen=True)
class DeltaHeads:
    """Sizes of a gated delta net."""

    num_key_heads: int
    num_value_heads: int
    """Heads that have a state each; consecutive ones share a key head."""
    key_dim: int
    value_dim: int
    conv_width: int = 4
    """Positions that the convolution before the recurrence reads, a row's own included."""

    @property
    def value_width(self) -> int:
        """Width of all values of a position."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of queries, keys and values of a position, which the convolution reads."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    @property
    def inputs(self) -> int:
        """Width of what is kept of a row: its channels, and two gates of each head."""
        return self.channels + 2 * self.num_value_heads

    @property
    def width(self) -> int:
        """Numbers that one row takes, output gates too."""
        return self.channels + self.value_width

    @property
    def window(self) -> int:
        """Rows before its own that the convolution reads."""
        return self.conv_width - 1


@dataclass(frozen=True)
class DeltaWeights:
    """The weights of a layer's recurrence; its products apart."""

    heads: DeltaHeads
    conv: Tensor
    """[channels, conv_width]"""
    decay: Tensor
    """[value heads] logarithm of how fast a state decays, in float32."""
    decay_bias: Tensor
    """[value heads] added to the decay's gate, in float32."""
    norm: Tensor
    """[value_dim] weight of the norm of what a head gives."""
    eps: float


@dataclass(frozen=True)
class DeltaState:
    """What one layer keeps of requests, by their table rows."""

    state: Tensor
    """[table rows, value heads, key_dim, value_dim] float32, behind the last sure row."""
    kept: Tensor
    """[table rows, window + most drafts, inputs]: inputs of the last sure rows, then of drafts."""

    @classmethod
    def empty(
        cls, heads: DeltaHeads, rows: int, drafts: int, dtype: torch.dtype, device: torch.device
    ) -> "DeltaState":
        """The state of a table of so many rows, with at most so many drafts in a pass."""
        sizes = rows, heads.num_value_heads, heads.key_dim, heads.value_dim
        state = torch.zeros(sizes, dtype=torch.float32, device=device)
        shape = rows, heads.window + drafts, heads.inputs
        return cls(state, torch.zeros(shape, dtype=dtype, device=device))


class DeltaRows(NamedTuple):
    """The rows of one pass, in spans of consecutive positions of a request."""

    requests: Tensor
    """[spans] table row; each comes once."""
    starts: Tensor
    """[spans] position of the first row; at 0 a state begins."""
    firsts: Tensor
    """[spans] the pass's row that is the span's first."""
    counts: Tensor
    """[spans] rows; 0 for a span that pads."""
    sure: Tensor
    """[spans] of these, how many are of known tokens; drafts follow."""
    accepted: Tensor
    """[table rows] how many of the kept drafts were accepted."""
    most: int
    """No span has more rows."""


@in_kernels("delta_net")
def recur(
    product: Tensor, gates: Tensor, weights: DeltaWeights, layer: DeltaState, rows: DeltaRows
) -> Tensor:
    """What a layer's heads give for the rows of a pass, normed and gated: [rows, value_width].

    product: [rows, channels + value_width] queries, keys and values, then output gates, with any
    row stride; gates: [rows, 2 * value heads] how much is written, then how much decays. The
    results of rows of no span are undefined.
    """
    heads, out = weights.heads, product.new_zeros(len(product), weights.heads.value_width)
    spans = (rows.requests, rows.starts, rows.firsts, rows.counts, rows.sure)
    for request, start, first, count, sure in zip(*(each.tolist() for each in spans), strict=True):
        if not count:
            continue
        own = slice(first, first + count)
        # at position 0 there is nothing to replay, whatever the last request of this row has left
        accepted = int(rows.accepted[request]) if start else 0
        kept = layer.kept[request]
        before = kept[: heads.window + accepted]
        if not start:
            before = torch.zeros_like(before)
        new = torch.cat((product[own, : heads.channels], gates[own]), dim=1)
        span = _Span(torch.cat((before, new)), accepted + sure, weights)
        state = layer.state[request] if start else torch.zeros_like(layer.state[request])
        given, state = span.run(state)
        out[own] = span.gated(given[accepted:], product[own, heads.channels :])
        layer.state[request] = state
        # rows begin with the convolution's window: what is kept are the inputs before the first
        # draft, then the drafts'
        after = span.rows[accepted + sure :]
        kept[: len(after)] = after
    return out


@dataclass(frozen=True)
class _Span:
    """Rows of one request, drafts that are replayed first."""

    rows: Tensor
    """[window + rows, inputs]"""
    sure: int
    """Rows behind which the state is stored."""
    weights: DeltaWeights

    def run(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the heads give, [rows, value heads, value_dim], and the state to store.

        state: [value heads, key_dim, value_dim] before the first row.
        """
        given, stored = [], state
        query, key, value = self._convolved()
        write, decay = self._gates()
        for row in range(len(query)):
            state = state * decay[row, :, None, None]
            known = (state * key[row, ..., None]).sum(1)
            change = (value[row] - known) * write[row, :, None]
            state = state + change[:, None] * key[row, ..., None]
            given.append((state * query[row, ..., None]).sum(1))
            # what comes behind are drafts, which may yet be rejected
            if row == self.sure - 1:
                stored = state
        return torch.stack(given), stored

    def gated(self, given: Tensor, gate: Tensor) -> Tensor:
        """Heads' values normed, and times their gates: [rows, value_width]. gate: the same."""
        normed = F.rms_norm(given.to(gate.dtype).float(), given.shape[-1:], None, self.weights.eps)
        weighed = normed.to(gate.dtype) * self.weights.norm
        opened = _by_row(F.silu, gate.float()).unflatten(1, given.shape[1:])
        return (weighed * opened).flatten(1).to(gate.dtype)

    def _convolved(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, one long, and values: [rows, value heads, key_dim or value_dim]."""
        heads, rows = self.weights.heads, self.rows[:, : self.weights.heads.channels].float()
        count, taps = len(rows) - heads.window, self.weights.conv.float().unbind(1)
        summed = sum(rows[i : i + count] * tap for i, tap in enumerate(taps))
        assert isinstance(summed, Tensor)
        mixed = _by_row(F.silu, summed).to(self.rows.dtype).float()
        width = heads.num_key_heads * heads.key_dim
        query, key, value = mixed.split((width, width, heads.value_width), dim=1)
        shared = heads.num_value_heads // heads.num_key_heads
        query, key = (
            _of_length_one(each.unflatten(1, (-1, heads.key_dim))).repeat_interleave(shared, dim=1)
            for each in (query, key)
        )
        return query * heads.key_dim**-0.5, key, value.unflatten(1, (-1, heads.value_dim))

    def _gates(self) -> tuple[Tensor, Tensor]:
        """How much each head writes, and what its state is multiplied by: [rows, value heads]."""
        heads, weights = self.weights.heads, self.weights
        gates = self.rows[heads.window :, heads.channels :].float()
        write, decay = gates.chunk(2, dim=1)
        speed = _by_row(F.softplus, decay + weights.decay_bias) * weights.decay.exp()
        return _by_row(torch.sigmoid, write), _by_row(torch.exp, -speed)


def _by_row(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """A function of each number, row by row: torch computes the last numbers of a tensor by other
    instructions, which round otherwise, so that rows would depend on how many there are."""
    return torch.stack([function(row) for row in rows.contiguous()])


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPS)
