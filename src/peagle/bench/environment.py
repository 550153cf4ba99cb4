"""What figures depend on: the machine, the versions, the settings."""

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from peagle.bench.prompts import Prompt
from peagle.bench.workload import PromptWorkload
from peagle.config import DType, EngineConfig, SamplingParams
from peagle.device import resolve_device, resolve_dtype
from peagle.installation import installed_version

ELSEWHERE = {"max_tokens", "temperature", "ignore_eos"}
"""Sampling parameters of which cases and other facts tell."""


def environment(workload: PromptWorkload) -> dict[str, Any]:
    """The machine, versions and settings that a result of models depends on."""
    pair = workload.pair
    models: dict[str, Any] = {"target": pair.target, "drafters": dict(pair.drafters)}
    given = {"quantization": pair.quantization, "num_tree_nodes": pair.num_tree_nodes}
    models |= {name: value for name, value in given.items() if value is not None}
    models |= work(workload.sets, workload.sampling)
    return machine() | computed_by(workload.engine) | models


def work(sets: Mapping[str, Sequence[Prompt]], sampling: SamplingParams) -> dict[str, Any]:
    """The requests that a result depends on."""
    prompts = [prompt for each in sets.values() for prompt in each]
    return {
        "prompts": {name: len(each) for name, each in sets.items()},
        "chats": sum(bool(prompt.messages) for prompt in prompts),
        "turns": sum(1 + len(prompt.later) for prompt in prompts),
        "max_tokens": sampling.max_tokens,
        "sampling": sampling.model_dump(exclude_defaults=True, exclude=ELSEWHERE),
        "ends": _ends(prompts, sampling),
    }


def _ends(prompts: Sequence[Prompt], sampling: SamplingParams) -> str:
    if not sampling.ignore_eos:
        return "at the end of text"
    if any(prompt.stop for prompt in prompts):
        return "where prompts say, else end of text ignored"
    return "end of text ignored"


def computed_by(engine: EngineConfig) -> dict[str, Any]:
    """The device and dtype of engines, and of what else they were asked what is not the default."""
    asked = engine.model_dump(exclude_defaults=True)
    return asked | hardware(engine.device, engine.dtype)


def hardware(device_name: str, dtype: DType) -> dict[str, Any]:
    """The device and dtype that an engine computes with."""
    device = resolve_device(device_name)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(resolve_dtype(dtype, device)).removeprefix("torch."),
    }


def machine() -> dict[str, Any]:
    """When, on what, and with which versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"peagle": installed_version()}
        | {name: version(name) for name in ("torch", "transformers")},
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
