"""What `auto` means on this machine."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from peagle.config import EngineConfig
from peagle.errors import InputError, MemoryShortageError

CPU_KV_CACHE = 1 << 30
MEMORY, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
PROMPT_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Most of these rows that go to prompts. They are fewer on a CPU: its time grows with the rows, and
a whole burst of prompts would wait for its last."""
STEP_TIMEOUT = {"cpu": 600.0, "cuda": 180.0}


def resolve_device(name: str) -> torch.device:
    """The torch device called `name`. Raises `InputError` when there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name} is unknown; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name} is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {name} was requested, but torch sees no GPU; use cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype called `name`; auto is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def batched_tokens(config: EngineConfig, device: torch.device) -> int:
    """Most target rows in one pass."""
    return config.max_num_batched_tokens or BATCHED_TOKENS[device.type]


def prompt_tokens(config: EngineConfig, device: torch.device) -> int:
    """Most of those rows that prompts may take."""
    return config.max_num_batched_tokens or PROMPT_TOKENS[device.type]


def step_timeout(config: EngineConfig, device: torch.device) -> float:
    """Seconds after which a step counts as stuck; infinite: never."""
    asked = config.step_timeout
    return STEP_TIMEOUT[device.type] if asked is None else asked or math.inf


def require_memory(needed: int, device: torch.device, what: str) -> None:
    """Raise `MemoryShortageError`, saying what is missing, unless a GPU has `needed` bytes free."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise MemoryShortageError(
            f"{what} take {gib(needed)} GiB and {gib(free)} of the GPU's {gib(total)} are free: "
            f"{gib(needed - free)} GiB are missing; free them or take a larger GPU"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated; on a CPU as the system and the container's limit say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_available(), default=whole)


def _available() -> Iterator[int]:
    """What Linux has ready, and what a control group's limit leaves, where there are any."""
    try:
        lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        yield int(lines["MemAvailable"].split()[0]) << 10
        limit, used = ((CGROUP / name).read_text() for name in ("memory.max", "memory.current"))
        yield int(limit) - int(used)  # "max" where there is no limit
    except (OSError, KeyError, ValueError):
        return


def gib(size: int) -> str:
    """A size in GiB, as messages give it."""
    return f"{size / 2**30:.1f}"


def kv_cache_memory(config: EngineConfig, device: torch.device, workspace: int = 0) -> int:
    """Bytes for the KV cache, besides the weights and the `workspace` bytes that steps need.

    Raises `MemoryShortageError` when none are left.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if device.type == "cpu":
        return CPU_KV_CACHE
    free, total = torch.cuda.mem_get_info(device)
    left = int(free - (1 - config.gpu_memory_utilization) * total) - workspace
    if left <= 0:
        raise MemoryShortageError(
            f"{gib(total - free)} of the GPU's {gib(total)} GiB are in use and a step needs "
            f"{gib(workspace)}, which is {gib(-left)} above gpu_memory_utilization "
            f"{config.gpu_memory_utilization}; raise it, or lower max_num_batched_tokens"
        )
    return left
