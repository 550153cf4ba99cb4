"""Small tensors from the host to the device, without waiting for what runs there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of numbers, copied in stream order; a plain copy would wait for the stream."""
    kind = None if values else torch.int64
    if device.type != "cuda":
        return torch.tensor(values, dtype=kind, device=device)
    return torch.tensor(values, dtype=kind, pin_memory=True).to(device, non_blocking=True)
