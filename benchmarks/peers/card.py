"""The graphics card as `nvidia-smi` shows it."""

import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

FIELDS = (
    *("name", "driver_version", "temperature.gpu", "clocks.sm", "power.draw"),
    *("memory.used", "memory.total"),
)
SLACK_MIB, FREE_SECONDS = 512, 60


def reading() -> dict[str, str | float]:
    """The values of the first card that CUDA sees; empty without a card."""
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    fields = f"--query-gpu={','.join(FIELDS)}"
    asked = ["nvidia-smi", "--id", which, fields, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(", ")
    return {name: _number(value) for name, value in zip(FIELDS, values, strict=True)}


def at_work(work: Callable[[], Any], seconds: float) -> dict[str, str | float]:
    """The reading while `work` is repeated, after `seconds` of it."""

    def later() -> dict[str, str | float]:
        time.sleep(seconds)
        return reading()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(later)
        while not found.done():
            work()
    return found.result()


def freed(used_before: float, seconds: float = FREE_SECONDS) -> bool:
    """Whether the card's memory in use returns to `used_before`, MiB, within `seconds`."""
    end = time.monotonic() + seconds
    while _used() > used_before + SLACK_MIB:
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def free_bytes() -> int | None:
    """The card's free memory without a context of our own on it; None without a card."""
    seen = reading()
    return int(float(seen["memory.total"]) - _used()) << 20 if seen else None


def _used() -> float:
    """MiB in use; 0 without a card."""
    return float(reading().get("memory.used", 0))


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
