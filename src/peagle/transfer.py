"""Copies to and from the device, for which the host does not wait.

A copy from or to pageable memory would make it wait for all work queued on the device; these go
through pinned memory.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """Numbers on the device, copied in stream order."""
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=None if values else torch.int64)
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same integer tensors on a device, as views of one, in one copy."""
    if device.type == "cpu":
        return tensors
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    count = sum(tensor.numel() for tensor in tensors)
    flat = torch.empty(count, dtype=dtype, pin_memory=True)
    torch.cat([tensor.flatten() for tensor in tensors], out=flat)
    parts = flat.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))


class Download:
    """A copy of a tensor to the host, begun at once in stream order."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event(blocking=True)  # whoever waits leaves its processor idle
        self._arrived.record()

    def tolist(self) -> Any:
        """The numbers, as `Tensor.tolist` nests them; waits for the copy, not for what follows."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
