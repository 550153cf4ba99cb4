"""Reports: a table for the terminal, and the result file with what it was measured on."""

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from peagle.bench.load import PromptWorkload, Run
from peagle.bench.pair import NAMES
from peagle.bench.verdict import Ratio, Verdict, speed_up
from peagle.config import DType
from peagle.device import resolve_device, resolve_dtype
from peagle.files import STDOUT, whole_file
from peagle.installation import installed_version


def environment(workload: PromptWorkload) -> dict[str, Any]:
    """The machine, versions and settings that a result depends on."""
    return (
        machine()
        | hardware(workload.device, workload.dtype)
        | {
            "target": workload.pair.target,
            "drafters": dict(workload.pair.drafters),
            "prompts": len(workload.prompts),
            "chats": sum(bool(prompt.messages) for prompt in workload.prompts),
            "max_tokens": workload.max_tokens,
            "sampling": f"greedy, {_ends(workload)}",
        }
    )


def _ends(workload: PromptWorkload) -> str:
    if any(prompt.stop for prompt in workload.prompts):
        return "to the end that prompts say, else end of text ignored"
    return "end of text ignored"


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


def summary_table(runs: Sequence[Run]) -> Table:
    """One row per method: speed with its interval, acceptance, and whether the text is the same."""
    table = _empty_table(("K", "tokens/s", "speed-up", "acceptance\nlength", "same\ntext"))
    table.columns[3].justify = "left"
    for run in runs:
        k, speed, _, length = _speed_cells(run, runs)
        ratio = speed_up(run, runs)
        told = "-" if ratio is None else ratio_text(ratio)
        table.add_row(NAMES[run.case.method], k, speed, told, length, _identical(run))
    return table


def ratio_text(ratio: Ratio) -> str:
    """A ratio and its interval: 1.63x (1.58-1.68)."""
    return f"{ratio.median:.2f}x{_interval(ratio)}"


def verdict_sentence(verdict: Verdict) -> str:
    """Which method is the fastest and by how much, or that this cannot be told."""
    words = NAMES | {"none": "no speculation"}
    first, second = (words[run.case.method] for run in (verdict.first, verdict.second))
    times = f"{verdict.lead.median:.2f} times as fast as {second}{_interval(verdict.lead)}"
    if verdict.clear:
        return f"Fastest on this machine: {first}, {times}."
    few = "" if verdict.lead.bounded else ", in too few rounds to say so"
    return f"No clear winner on this machine: {first} was {times}{few}."


def _interval(ratio: Ratio) -> str:
    """In parentheses; nothing where it has no bounds or no width."""
    if ratio.bounded and ratio.low < ratio.high:
        return f" ({ratio.low:.2f}-{ratio.high:.2f})"
    return ""


def full_table(runs: Sequence[Run]) -> Table:
    """One row per run, with its median latencies."""
    columns = ("K", "OTPS", "speed-up", "AL", "TTFT ms", "ITL ms", "E2E ms", "same")
    table = _empty_table(("C", *columns))
    for run in runs:
        found = run.measures
        medians = (timing.p50 for timing in (found.ttft_ms, found.itl_ms, found.e2e_ms))
        table.add_row(
            NAMES[run.case.method],
            str(run.case.concurrency),
            *_speed_cells(run, runs),
            *(f"{median:.1f}" for median in medians),
            _identical(run),
        )
    return table


def _empty_table(columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _speed_cells(run: Run, runs: Sequence[Run]) -> tuple[str, str, str, str]:
    ratio = speed_up(run, runs)
    return (
        str(run.case.k or "-"),
        f"{run.measures.otps:.1f}",
        f"{ratio.median:.2f}x" if ratio is not None else "-",
        f"{run.measures.acceptance_length:.2f}",
    )


def _identical(run: Run) -> str:
    return {True: "yes", False: "[red]no[/]", None: "-"}[run.identical_to_none]


@contextmanager
def result_file(path: Path | None) -> Iterator[Callable[[Any], None]]:
    """A function that writes a result as JSON, to `STDOUT` or a file; without a path, nowhere.

    The file is opened before the block runs. Raises `InputError` when it cannot be written.
    """
    if path is None:
        yield lambda _: None
    elif path == STDOUT:
        yield lambda result: print(json.dumps(result, indent=1))
    else:
        with whole_file(path) as file:
            yield lambda result: print(json.dumps(result, indent=1), file=file)
