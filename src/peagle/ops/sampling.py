"""Logits -> processed distribution -> token, with randomness keyed by (seed, position, token).

A token is drawn by a race: each one of the vocabulary arrives after an exponential time divided by
its probability, and the first is a draw from the distribution. Since a token's time depends on
nothing but its own key, logits that round otherwise change a draw only where two arrive together;
a number looked up in the cumulative distribution would move with every token before it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.ops.argmax import argmax
from peagle.ops.triton import in_kernels

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHORT_1, _SHORT_2 = 0x7FEB352D, 0x846CA68B
LARGEST = 1 - 2.0**-24
"""The largest of float32's numbers below 1."""


class Sampling(NamedTuple):
    """How each row of a batch, or of a request table, samples: [rows] each."""

    temperature: Tensor
    """0 is greedy."""
    top_k: Tensor
    """0 keeps every token."""
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    """int64"""

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "Sampling":
        """Greedy rows."""
        real = [torch.zeros(rows, dtype=torch.float32, device=device) for _ in range(3)]
        whole = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2)]
        return cls(real[0], whole[0], real[1], real[2], whole[1])

    def split(self, rows: int) -> list["Sampling"]:
        """Parts of `rows` rows each."""
        columns = [column.split(rows) for column in self]
        return [Sampling(*part) for part in zip(*columns, strict=True)]

    def of(self, rows: Tensor) -> "Sampling":
        """Those of some rows, [taken]."""
        return Sampling(*(column[rows] for column in self))


@in_kernels("sampling")
def sample_requests(
    logits: Tensor, table: Sampling, requests: Tensor, firsts: Tensor, depths: Tensor | None = None
) -> Tensor:
    """A token for each row by its request's settings: the argmax where that is greedy, -1 for NaN.

    logits: [rows, vocab], the same number of rows for each request;
    requests: [requests] rows of the table; firsts: [table rows], position in its sequence of the
    token of a request's first row; depths: [rows] how much further each row's is, None for 0, 1, 2
    ... of each request. The kernel works in float32: its token may differ where two
    arrive, or the edge of min-p or top-p lies, closer together than float32 can tell.
    """
    count = len(logits) // len(requests)
    members = requests.repeat_interleave(count)
    if depths is None:
        depths = torch.arange(count, device=firsts.device).repeat(len(requests))
    return sample(logits, table.of(members), firsts[members] + depths)


def sample(logits: Tensor, rows: Sampling, positions: Tensor) -> Tensor:
    """A token for each row: the argmax where temperature is 0, else a draw; -1 for NaN logits.

    logits: [rows, vocab]; positions: [rows] int64, the token's position in its sequence.
    """
    greedy = argmax(logits)
    settled = (rows.temperature == 0) | (greedy < 0)
    if bool(settled.all()):
        return greedy
    times = exponentials(rows.seeds, positions, logits.shape[1])
    drawn = draw(distribution(logits, rows), times)
    return torch.where(settled, greedy, drawn)


def distribution(logits: Tensor, rows: Sampling) -> Tensor:
    """Probabilities after temperature, then min-p, top-k and top-p. [rows, vocab], float64."""
    temperature = torch.where(rows.temperature == 0, 1.0, rows.temperature)
    scaled = logits.double() / temperature[:, None]
    probabilities = scaled.softmax(dim=-1)
    floor = rows.min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
    scaled = scaled.masked_fill(probabilities < floor, float("-inf"))
    if bool((rows.top_k > 0).any()) or bool((rows.top_p < 1).any()):
        scaled = _keep_top(scaled, rows)
    return scaled.softmax(dim=-1)


def _keep_top(scaled: Tensor, rows: Sampling) -> Tensor:
    """Mask tokens outside the k most likely, then outside the smallest set reaching top-p."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    limit = torch.where(rows.top_k > 0, rows.top_k, scaled.shape[-1])
    ordered = ordered.masked_fill(rank >= limit[:, None], float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    beyond = (before >= rows.top_p[:, None]) & (rank > 0)  # the most likely one always stays
    ordered = ordered.masked_fill(beyond, float("-inf"))
    return torch.empty_like(ordered).scatter_(-1, order, ordered)


def draw(probabilities: Tensor, times: Tensor) -> Tensor:
    """The token that arrives first: the least of `times` over `probabilities`. Both [rows, vocab].

    A row of NaN gives some token, too.
    """
    return (probabilities / times).argmax(dim=-1)


def exponentials(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Exponential times, above 0, of each (seed, position)'s tokens. [rows, vocab] float32.

    seeds, positions: [rows] int64.
    """
    return arrival_times(seeds, positions, torch.arange(vocab, device=seeds.device))


def arrival_times(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The same of some tokens alone, [tokens] or [rows, tokens] int64: [rows, tokens] float32.

    A row's key is splitmix64's; a token's 31 bits are two rounds of a 32-bit mixer, one for each
    half of the key. They keep small times, which win, apart down to 5e-10, so that a token of a
    probability below some 1e-10 is hardly ever drawn.
    """
    key = _mix(_mix(seeds + _signed(_GOLDEN)) + positions * _signed(_GOLDEN))
    low, high = (part.to(torch.int32)[:, None] for part in (key, key >> 32))
    bits = _mix_short(tokens.to(torch.int32) ^ low)
    bits = _mix_short(bits ^ high) & 0x7FFFFFFF
    shares = ((bits.float() + 0.5) * 2.0**-31).clamp(max=LARGEST)  # else one token may never arrive
    return shares.neg().log1p().neg()


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shift(state, 27)) * _signed(_MIX_2)
    return state ^ _shift(state, 31)


def _mix_short(state: Tensor) -> Tensor:
    """lowbias32 of C. Wellons's hash prospector; in place. int32"""
    state ^= _shift(state, 16)
    state *= _SHORT_1
    state ^= _shift(state, 15)
    state *= _SHORT_2 - (1 << 32)
    state ^= _shift(state, 16)
    return state


def _shift(state: Tensor, bits: int) -> Tensor:
    # shifts of signed numbers drag the sign along; a mixer needs zeros
    return (state >> bits) & ((1 << (8 * state.element_size() - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64)
