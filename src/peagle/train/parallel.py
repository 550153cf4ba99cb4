"""Data parallel training under torchrun: each rank runs some of a step's passes."""

import atexit
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

MOMENT = 0.5
"""Seconds."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> tuple[Self, torch.device]:
        """Join the group that torchrun describes, if any; the device that is this rank's."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(), device
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(_leave)
        return cls(dist.get_rank(), size), device

    @property
    def first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def own(self, count: int) -> range:
        """Which of a step's passes are this rank's."""
        return range(self.rank, count, self.size)

    def idle(self, count: int) -> int:
        """How many passes fewer this rank has than the busiest one, where they share so many."""
        return -(-count // self.size) - len(self.own(count))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum over the ranks, in place."""
        if self.size == 1:
            return
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            assert work is not None
            work.wait()

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether some rank says so; all hear the same answer."""
        said = torch.tensor(float(flag), device=device)
        self.add_up([said])
        return bool(said)

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            dist.barrier()


def _leave() -> None:
    """End the group a moment after its last work.

    Its threads let go of tensors just after the work is done. One that does so when the interpreter
    has begun to end asks for a lock that nobody gives any more, which aborts the process.
    """
    time.sleep(MOMENT)
    dist.destroy_process_group()
