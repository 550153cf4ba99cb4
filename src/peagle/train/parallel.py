"""Data parallel training under torchrun: each rank runs some of a step's passes."""

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from peagle.errors import InputError
from peagle.transfer import Download

LEAVE_SECONDS = 0.5
"""How long a process waits after its last work before it leaves the group."""
MEETING = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables, besides WORLD_SIZE, that processes need to find each other."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> tuple[Self, torch.device]:
        """Join the group that torchrun describes, if any; also returns this rank's device.

        Raises `InputError` when torchrun's variables are incomplete.
        """
        size = _world_size()
        if size == 1:
            return cls(), device
        needed = [] if dist.is_initialized() else [*MEETING]
        needed += ["LOCAL_RANK"] if device.type == "cuda" else []
        if missing := [name for name in needed if name not in os.environ]:
            raise InputError(
                f"WORLD_SIZE is {size}, but {', '.join(missing)} not set: start with torchrun, or "
                "unset WORLD_SIZE to train alone"
            )
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
        """How many of `count` passes fewer this rank runs than the busiest one."""
        return -(-count // self.size) - len(self.own(count))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sum over the ranks, in place."""
        if self.size == 1:
            return
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            assert work is not None
            work.wait()

    def ask(self, flag: bool, device: torch.device) -> Callable[[], bool]:
        """A function that says whether any rank's flag is set; it waits for no later work of the
        device."""
        said = torch.tensor(float(flag), device=device)
        self.add_up([said])
        heard = Download(said)
        return lambda: bool(heard.tolist())

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raises `InputError` on every rank unless all begin with the same facts as the first.

        facts: keyed by the words an error uses for a mismatch, such as "another recipe".
        """
        if self.size == 1:
            return
        of_ranks: list[Mapping[str, str]] = [facts] * self.size
        dist.all_gather_object(of_ranks, facts)
        for rank, theirs in enumerate(of_ranks):
            for what, value in theirs.items():
                if value != of_ranks[0][what]:
                    raise InputError(
                        f"rank {rank} has {what} than rank 0; all need the same recipe and data, "
                        "and an output on a disk that all of them see"
                    )

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier()


ALONE = Ranks()


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"WORLD_SIZE {text} is not a number of processes")
    return int(text)


def _leave() -> None:
    """Leave the group shortly after its last work.

    Its threads release tensors just after the work is done. One that does so once the interpreter
    has begun to shut down asks for a lock that it can no longer get, which aborts the process.
    """
    time.sleep(LEAVE_SECONDS)
    dist.destroy_process_group()
