"""Penalties of a batch in one launch; a request without any costs a look at its rates."""

import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.penalties import PROMPT, Penalties

BLOCK = 4096
PROGRAMS = 528
"""Four on each of an H200's multiprocessors."""
OF_PROMPT = tl.constexpr(PROMPT)


def penalize(logits: Tensor, drafts: Tensor, penalties: Penalties, requests: Tensor) -> None:
    """As the reference; logits with any row stride."""
    rows, vocab = logits.shape
    parts = min(triton.cdiv(PROGRAMS, rows), triton.cdiv(vocab, BLOCK))
    _penalize[(rows, parts)](
        logits,
        drafts,
        penalties,
        requests,
        drafts.shape[1] + 1,
        vocab,
        logits.stride(0),
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        num_warps=8,
    )


def count_emitted(penalties: Penalties, requests: Tensor, emitted: Tensor, numbers: Tensor) -> None:
    """As the reference."""
    width = emitted.shape[1]
    _count_emitted[(len(requests),)](
        penalties,
        requests,
        emitted,
        numbers,
        width,
        penalties.counts.shape[1],
        WIDTH=triton.next_power_of_2(width),
        num_warps=1,
    )


@triton.jit
def rates_of(rates, request):
    """A request's penalties."""
    at = rates + request * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def are_some(repetition, presence, frequency):
    """Whether penalties change anything."""
    return (repetition != 1) | (presence != 0) | (frequency != 0)


@triton.jit(do_not_specialize=["rows"])  # a prompt's end is one row, a cycle K + 1
def _penalize(logits, drafts, penalties, requests, rows, vocab, stride, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index, place = row // rows, row % rows
    request = tl.load(requests + index).to(tl.int64)
    repetition, presence, frequency = rates_of(penalties.rates, request)
    if not are_some(repetition, presence, frequency):
        return
    proposed = drafts + index * (rows - 1)
    for begin in range(part * BLOCK, vocab, tl.num_programs(1) * BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < vocab
        known = tl.load(penalties.counts + request * vocab + column, mask=inside, other=0)
        # a row's logits count only where all drafts before it are accepted, and so written
        for draft in range(place):
            known += (tl.load(proposed + draft) == column).to(tl.int32)
        # a token of the prompt has `PROMPT` added once: it is repeated, but not written
        written = (known % OF_PROMPT).to(tl.float32)
        at = logits + row * stride + column
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        # rounded like torch's division; Triton's own is off by a bit at times
        repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value = tl.where(known > 0, repeated, value) - frequency * written
        value -= tl.where(written > 0, presence, 0.0)
        tl.store(at, value.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _count_emitted(penalties, requests, emitted, numbers, width, vocab, WIDTH: tl.constexpr):
    request = tl.load(requests + tl.program_id(0)).to(tl.int64)
    repetition, presence, frequency = rates_of(penalties.rates, request)
    if not are_some(repetition, presence, frequency):
        return
    step = tl.arange(0, WIDTH)
    there = step < tl.minimum(tl.load(numbers + request), width)
    token = tl.load(emitted + request * width + step, mask=there, other=0)
    tl.atomic_add(penalties.counts + request * vocab + token, 1, mask=there)
