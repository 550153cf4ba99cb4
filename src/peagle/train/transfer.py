"""Moves small index tensors to the device that computes, in one asynchronous copy."""

from functools import reduce

import torch
from torch import Tensor


def to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same integer tensors on a device, as views of one.

    A copy from pageable memory would make the host wait for all work queued on the device; one from
    pinned memory does not.
    """
    if device.type == "cpu":
        return tensors
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    count = sum(tensor.numel() for tensor in tensors)
    flat = torch.empty(count, dtype=dtype, pin_memory=True)
    torch.cat([tensor.flatten() for tensor in tensors], out=flat)
    parts = flat.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))
