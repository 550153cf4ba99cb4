"""`peagle bench`: compare methods, K and concurrency on the same prompts."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from peagle.cli.options import (
    Device,
    DTypeName,
    Eagle3,
    Peagle,
    Target,
    Threads,
    from_flags,
    use_threads,
)
from peagle.cli.progress import progress_bar
from peagle.cli.tables import print_table
from peagle.config import DraftLengthMode
from peagle.errors import InputError
from peagle.files import writing

if TYPE_CHECKING:
    from peagle.bench.load import Case, PromptWorkload, Workload
    from peagle.bench.synthetic import SyntheticWorkload

EXAMPLE = """\b
Examples:
  peagle bench --k 3,5,7 --concurrency 1,4 --json result.json
  peagle bench --prompts HumanEval.jsonl.gz --limit 32 --methods none,peagle
  peagle bench --shape qwen3-8b --random-weights --synthetic-acceptance 3.94 --k 7"""


def bench(
    prompts: Annotated[
        str, typer.Option(help="bundled, or a file: .jsonl, .jsonl.gz or .txt (one per line).")
    ] = "bundled",
    methods: Annotated[
        str, typer.Option(help="Methods to run: any of none, eagle3, peagle.")
    ] = "none,eagle3,peagle",
    k: Annotated[
        str, typer.Option("--k", help="Drafts per cycle, one or several: 3,5,7.")
    ] = "3,5,7",
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight, one or several: 1,8.")
    ] = "1",
    max_tokens: Annotated[
        int, typer.Option(help="Output tokens of a request; fewer where its prompt says its end.")
    ] = 128,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Use only this many prompts, the first ones.", show_default="all of them"
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the result to this file.", show_default="none")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Run a published size, not a model: qwen3-8b, ...", show_default="none"),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Required by --shape: its weights are random.")
    ] = False,
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(help="Acceptance length to simulate with --shape.", show_default="none"),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt length with --shape.")] = 256,
    draft_length: Annotated[
        DraftLengthMode,
        typer.Option(help="With --shape; auto: as many drafts, up to K, as are fastest."),
    ] = "fixed",
    target: Target = None,
    eagle3: Eagle3 = None,
    peagle: Peagle = None,
    dtype: DTypeName = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure speed, acceptance and latency.

    Greedy. All inputs are checked before the first run; the result file appears whole or not at
    all.
    """
    from peagle.bench.load import PromptWorkload, list_cases
    from peagle.bench.pair import choose_pair
    from peagle.bench.prompts import load_prompts
    from peagle.bench.report import environment
    from peagle.bench.shapes import shape_of
    from peagle.bench.synthetic import SyntheticWorkload

    cases = list_cases(
        _methods(methods), _numbers("--k", k), _numbers("--concurrency", concurrency)
    )
    use_threads(threads)
    if shape is not None:
        shape_of(shape)  # an unknown one is refused first
        if target or eagle3 or peagle:
            raise InputError("--shape makes its own models; leave out --target, --eagle3, --peagle")
        acceptance = _acceptance(cases, random_weights, synthetic_acceptance)
        synthetic = SyntheticWorkload(
            shape, acceptance, prompt_tokens, max_tokens, draft_length, dtype, device
        )
        _run_shape(synthetic, cases, json)
        return
    if random_weights or synthetic_acceptance is not None or draft_length != "fixed":
        raise InputError("--random-weights, --synthetic-acceptance and --draft-length need --shape")
    from transformers import AutoTokenizer  # noqa: F401 (Ctrl-C during it leaves no file yet)

    given = tuple(load_prompts(prompts, limit))
    pair = choose_pair(_methods(methods), target, {"eagle3": eagle3, "peagle": peagle})
    with from_flags():
        workload = PromptWorkload(pair, given, max_tokens, dtype, device)
    _check(workload, cases)
    _run(workload, cases, environment(workload), json, len(cases) * len(workload.prompts))


def _acceptance(
    cases: "Sequence[Case]", random_weights: bool, synthetic_acceptance: float | None
) -> float:
    if not random_weights:
        raise InputError("--shape has random weights; add --random-weights to confirm")
    if all(case.k == 0 for case in cases):
        return synthetic_acceptance or 1.0
    if synthetic_acceptance is None:
        raise InputError(
            "random drafters are never right; add --synthetic-acceptance AL, such as 3.94"
        )
    least = min(case.k for case in cases if case.k)
    if synthetic_acceptance > least + 1:
        raise InputError(
            f"--synthetic-acceptance {synthetic_acceptance}: {least} drafts and the bonus make at "
            f"most {least + 1}"
        )
    return synthetic_acceptance


def _run_shape(workload: "SyntheticWorkload", cases: "Sequence[Case]", json: Path | None) -> None:
    from peagle.bench.report import hardware, machine

    environment = machine() | hardware(workload.device, workload.dtype) | workload.describe()
    requests = sum(case.concurrency for case in cases) * workload.rounds
    _run(workload, cases, environment, json, requests, workload.caption)


def _methods(text: str) -> list[str]:
    from peagle.bench.pair import METHODS

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METHODS:
            raise InputError(f"--methods {text}: {name!r} is none of {', '.join(METHODS)}")
    return names


def _numbers(option: str, text: str) -> list[int]:
    """Distinct positive numbers, from text such as "3,5,7"."""
    try:
        numbers = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"{option} {text}: give whole numbers, such as 3,5,7") from None
    if min(numbers) < 1:
        raise InputError(f"{option} {text}: every number must be at least 1")
    return numbers


def _check(workload: "PromptWorkload", cases: "Sequence[Case]") -> None:
    most = max(case.concurrency for case in cases)
    if most > len(workload.prompts):
        raise InputError(
            f"--concurrency {most} needs as many prompts, but there are {len(workload.prompts)}"
        )
    for warning in workload.pair.check(max(case.k for case in cases)):
        typer.echo(f"peagle: warning: {warning}", err=True)


def _run(
    workload: "Workload",
    cases: "Sequence[Case]",
    environment: dict[str, Any],
    json: Path | None,
    requests: int,
    caption: str = "",
) -> None:
    """Run all cases, print the table and write the result file, for which the disk may be full."""
    from peagle.bench.load import run_cases
    from peagle.bench.report import full_table, result_file

    with ExitStack() as files:
        write = files.enter_context(result_file(json))
        with progress_bar("requests", requests) as advance:
            runs = list(run_cases(workload, cases, advance))
        print_table(Console(), full_table(runs))
        typer.echo(caption, nl=bool(caption))
        if json is not None:
            with writing(json, "the table holds what was measured"):
                write({"environment": environment, "runs": [run.as_json() for run in runs]})
                files.close()
