"""Keys and values in a cache whose type is narrower than the one that they are computed in.

All readers see the same numbers, those of a pass's own rows too: what is stored, widened again.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3, which has no infinity: what is larger becomes this one."""


def stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values of any shape as a cache of a type keeps them: in units of `scale`."""
    if dtype == x.dtype:
        return x
    units = x.float() / scale
    return (units.clamp(-LARGEST, LARGEST) if dtype == E4M3 else units).to(dtype)


def widened(kept: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """The inverse of `stored`, but for its rounding."""
    return kept if kept.dtype == dtype else (kept.float() * scale).to(dtype)


def gathered(side: Tensor, slots: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values of some slots, widened. side: [slots of a cache, kv_heads, head_dim]."""
    if side.dtype == dtype:
        return side.index_select(0, slots)
    return widened(side[slots], dtype, scale)
