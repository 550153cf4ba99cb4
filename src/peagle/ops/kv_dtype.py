"""Keys and values in a cache whose type is narrower than the one that they are computed in.

All readers see the same numbers, those of a pass's own rows too: what is stored, widened again.
"""

import torch
from torch import Tensor

from peagle.ops.weight.fp8 import E4M3, LARGEST_E4M3


def stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values of any shape as a cache of a type keeps them: in units of `scale`."""
    if dtype == x.dtype:
        return x
    units = x.float() / scale
    return (units.clamp(-LARGEST_E4M3, LARGEST_E4M3) if dtype == E4M3 else units).to(dtype)


def widened(kept: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """The inverse of `stored`, but for its rounding."""
    return kept if kept.dtype == dtype else (kept.float() * scale).to(dtype)


def gathered(
    cache: Tensor, slots: Tensor, dtype: torch.dtype, scales: tuple[float, float]
) -> tuple[Tensor, ...]:
    """Keys and values of some slots, widened. cache: [2, slots, kv_heads, head_dim]."""
    if cache.dtype == dtype:
        return tuple(side.index_select(0, slots) for side in cache)
    sides = zip(cache, scales, strict=True)
    return tuple(widened(side[slots], dtype, scale) for side, scale in sides)
