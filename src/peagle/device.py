"""What `auto` means on this machine."""

import torch

from peagle.config import EngineConfig
from peagle.errors import InputError

CPU_KV_CACHE = 1 << 30


def resolve_device(name: str) -> torch.device:
    """The torch device of a name. Raises `InputError` when there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name} is unknown; use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name} is not supported; use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {name} was asked for, and torch sees no GPU; use cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of a name; auto is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def kv_cache_memory(config: EngineConfig, device: torch.device) -> int:
    """Bytes for the KV cache beside the weights. Raises `InputError` when none are left."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if device.type == "cpu":
        return CPU_KV_CACHE
    free, total = torch.cuda.mem_get_info(device)
    left = int(free - (1 - config.gpu_memory_utilization) * total)
    if left <= 0:
        raise InputError(
            f"{(total - free) / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB are in use, which "
            f"is above gpu_memory_utilization {config.gpu_memory_utilization}; raise it"
        )
    return left
