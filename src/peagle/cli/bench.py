"""`peagle bench`: methods, K and concurrency against each other on the same prompts."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from peagle.cli.options import Device, DTypeName, Eagle3, Peagle, Target, Threads, use_threads
from peagle.cli.progress import progress_bar
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.load import Case, Run, Workload

EXAMPLE = """Examples:

[bold]peagle bench --k 3,5,7 --concurrency 1,4 --json result.json[/]

[bold]peagle bench --prompts HumanEval.jsonl.gz --limit 32 --methods none,peagle[/]"""


def bench(
    prompts: Annotated[
        str, typer.Option(help="bundled, or a file: .jsonl, .jsonl.gz or .txt (one a line).")
    ] = "bundled",
    methods: Annotated[
        str, typer.Option(help="Some of none, eagle3 and peagle.")
    ] = "none,eagle3,peagle",
    k: Annotated[str, typer.Option("--k", help="Numbers of tokens to draft a cycle.")] = "3,5,7",
    concurrency: Annotated[str, typer.Option(help="Numbers of requests in flight.")] = "1",
    max_tokens: Annotated[int, typer.Option(help="Output tokens of every request.")] = 128,
    limit: Annotated[
        int | None, typer.Option(help="Use the first prompts only.", show_default="all of them")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Result file to write.", show_default="none")
    ] = None,
    target: Target = None,
    eagle3: Eagle3 = None,
    peagle: Peagle = None,
    dtype: DTypeName = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure speed, acceptance and latency, greedy, every request of the same length.

    All inputs are checked before the first run; the result file appears whole or not at all.
    """
    from peagle.bench.load import Workload, list_cases
    from peagle.bench.pair import choose_pair
    from peagle.bench.prompts import load_prompts
    from peagle.bench.report import environment, full_table, whole_file, write_result

    cases = list_cases(
        _methods(methods), _numbers("--k", k), _numbers("--concurrency", concurrency)
    )
    given = tuple(load_prompts(prompts, limit))
    pair = choose_pair(_methods(methods), target, {"eagle3": eagle3, "peagle": peagle})
    workload = Workload(pair, given, max_tokens, dtype, device)
    _check(workload, cases)
    use_threads(threads)
    with whole_file(json) if json is not None else nullcontext() as file:
        runs = _run(workload, cases)
        if file is not None:
            write_result(file, environment(workload), runs)
    Console().print(full_table(runs))


def _methods(text: str) -> list[str]:
    from peagle.bench.pair import METHODS

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METHODS:
            raise InputError(f"--methods {text}: {name!r} is none of {', '.join(METHODS)}")
    return names


def _numbers(option: str, text: str) -> list[int]:
    """Distinct positive numbers, as "3,5,7" names them."""
    try:
        numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"{option} {text}: give whole numbers, such as 3,5,7") from None
    if min(numbers) < 1:
        raise InputError(f"{option} {text}: every number must be at least 1")
    return numbers


def _check(workload: "Workload", cases: "Sequence[Case]") -> None:
    most = max(case.concurrency for case in cases)
    if most > len(workload.prompts):
        raise InputError(
            f"--concurrency {most} needs as many prompts, and there are {len(workload.prompts)}"
        )
    for warning in workload.pair.check(max(case.k for case in cases)):
        typer.echo(f"peagle: warning: {warning}", err=True)


def _run(workload: "Workload", cases: "Sequence[Case]") -> "list[Run]":
    from peagle.bench.load import run_cases

    with progress_bar("requests", len(cases) * len(workload.prompts)) as advance:
        return list(run_cases(workload, cases, advance))
