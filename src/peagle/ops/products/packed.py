"""Weights laid out once for products on a CPU."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

HALF_STEP = 2.0**-25
"""Half of float16's smallest step: what numbers too small for it lose by rounding."""


def packed_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """`x @ weight.T + bias` on a CPU, with the weight packed once; None where it cannot be.

    Decoding waits for weights, so float32 weights that came from a bfloat16 or float16 checkpoint
    are kept in float16, half the bytes, and widened again in registers: products and sums stay in
    float32. Others, such as those widened from FP8, are packed by oneDNN.
    """
    if weight.dtype == torch.float32:
        if "fbgemm" in torch.backends.quantized.supported_engines and fits_half(weight):
            return _half(weight, bias)
        return _onednn(weight, bias) if torch.backends.mkldnn.is_available() else None
    supported = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return _onednn(weight, bias) if supported else None


def fits_half(weight: Tensor) -> bool:
    """Whether a float32 weight loses nothing in float16 that float32 sums would keep.

    True of bfloat16's and float16's numbers below 65,504: only those under 2^-17 are rounded, by
    at most 2^-25.
    """
    return bool((weight.half().float() - weight).abs().max() <= HALF_STEP)


def _half(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    product = torch.ops.quantized.linear_dynamic_fp16.default
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return lambda x: product(x, packed)

    def even(x: Tensor) -> Tensor:
        rows = len(x)
        if not _ends_short(rows):
            return product(x, packed)
        return product(F.pad(x, (0, 0, 0, -rows % 3)), packed)[:rows]

    return even


def _ends_short(rows: int) -> bool:
    """Whether FBGEMM multiplies the last one or two of so many rows by themselves.

    Its AVX2 kernels sum these in another order, so that a row's result would depend on the number
    of rows. Read off results for up to 512 rows: never with a multiple of three. A token without
    drafts takes the bundled target a fifth longer for it, six rows as long as before.
    """
    return rows in (1, 2, 7, 14) or (rows > 30 and rows % 6 in (1, 2))


def _onednn(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, bias, "none", [], "")
