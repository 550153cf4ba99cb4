"""SwiGLU and its gradient, each of which reads and writes everything once, and the forms that Gemma
and GPT-OSS have of it."""

import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton.fences import fence

BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """As the reference."""
    return _launch(gate_up, gelu=False)


def geglu(gate_up: Tensor) -> Tensor:
    """As the reference."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: Tensor, gelu: bool) -> Tensor:
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(2048, triton.next_power_of_2(width))
    fence()
    _glu[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, GELU=gelu)
    return out


def gradient(gate_up: Tensor, of_result: Tensor) -> Tensor:
    """As the reference."""
    gate_up, of_result = gate_up.contiguous(), of_result.contiguous()
    out = gate_up.new_empty(gate_up.shape)
    rows, width = of_result.shape
    _gradient[(rows, triton.cdiv(width, BLOCK))](gate_up, of_result, out, width, BLOCK=BLOCK)
    return out


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """silu(gate) * up, or gelu(gate) * up, with GELU approximated by tanh, in float32."""
    x = gate
    if GELU:  # (1 + tanh(x)) / 2 is sigmoid(2 x), which does not overflow
        x = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    return gate * tl.sigmoid(x) * up


@triton.jit
def _glu(gate_up, out, width, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    result = gated(gate, up, GELU)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(gate_up, of_result, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    begin = row * 2 * width + column
    gate = tl.load(gate_up + begin, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + begin + width, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(of_result + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = given * up * share * (1 + gate * (1 - share))
    of_up = given * gate * share
    tl.store(out + begin, of_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + begin + width, of_up.to(out.dtype.element_ty), mask=inside)


@triton.jit
def clamped_swiglu(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """GPT-OSS's activation, as `peagle.ops.moe.clamped_swiglu`; NaN passes."""
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate * tl.sigmoid(ALPHA * gate) * (up + 1)
