"""Small index tensors to the device that computes, in one copy that nobody waits for."""

import torch
from torch import Tensor


def to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same integer tensors on a device, as views of one.

    A copy from pageable memory would make the host wait for everything that the device still has to
    do; a pinned one does not.
    """
    if device.type == "cpu":
        return tensors
    flat = torch.cat([tensor.flatten() for tensor in tensors]).pin_memory()
    parts = flat.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return tuple(part.view(t.shape) for part, t in zip(parts, tensors, strict=True))
