"""Tensors from the host to the device, without waiting for what runs there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Numbers, copied in stream order; a plain copy would wait for the stream."""
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=None if values else torch.int64)
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
