"""Tensors from the device to the host, without waiting until somebody reads them."""

from typing import Any

import torch
from torch import Tensor


class Download:
    """A copy of a tensor, begun at once in stream order."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def tolist(self) -> list[Any]:
        """The numbers, as `Tensor.tolist` nests them; waits for the copy, not for what follows."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
