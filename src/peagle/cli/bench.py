"""`peagle bench`: compare methods, K and concurrency on the same prompts."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from peagle.cli.compared import Compared, numbers
from peagle.cli.groups import group
from peagle.cli.loading import as_chats
from peagle.cli.options import Chat, Hardware, Target, Threads, from_flags, use_threads
from peagle.cli.progress import progress_bar
from peagle.cli.synthetic import Synthetic
from peagle.cli.tables import print_table
from peagle.errors import InputError
from peagle.files import STDOUT, refuse_existing, writing

if TYPE_CHECKING:
    from peagle.bench.load import Case, Workload
    from peagle.bench.prompts import Prompt

EXAMPLE = """\b
Examples:
  peagle bench --k 3,5,7 --concurrency 1,4 --json result.json
  peagle bench ./target --drafter ./drafter --chat --prompts questions.jsonl
  peagle bench --prompts HumanEval.jsonl.gz --limit 32 --methods none,peagle
  peagle bench --shape qwen3-8b --random-weights --synthetic-acceptance 3.94 --k 7"""


def _no_flag(json: Path | None) -> Path | None:
    """The file of --json, which is not the flag that follows it."""
    if str(json).startswith("--"):
        raise InputError("--json needs a FILE, or - for stdout; peagle generate's needs none")
    return json


def bench(
    *,
    target: Target,
    compared: Annotated[Compared, group(Compared)],
    prompts: Annotated[
        str, typer.Option(help="bundled, or a file: .jsonl, .jsonl.gz or .txt (one per line).")
    ] = "bundled",
    chat: Chat = False,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Use only this many prompts, the first ones.", show_default="all of them"
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight, one or several: 1,8.")
    ] = "1",
    max_tokens: Annotated[
        int, typer.Option(help="Output tokens of a request; fewer where its prompt says its end.")
    ] = 128,
    json: Annotated[
        Path | None,
        typer.Option(
            help="Write the result to this file; - is stdout.",
            show_default="none",
            callback=_no_flag,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --json.")] = False,
    synthetic: Annotated[Synthetic, group(Synthetic)],
    hardware: Hardware,
    threads: Threads = None,
) -> None:
    """Measure speed, acceptance and latency.

    Greedy. All inputs are checked before the first run; the result file appears whole or not at
    all.
    """
    levels = numbers("--concurrency", concurrency)
    if json is not None and json != STDOUT:
        refuse_existing(json, force)
    use_threads(threads)
    if synthetic.shape is not None:
        if target or compared.names_drafters or chat:
            raise InputError("--shape makes its own models; leave out targets, drafters and --chat")
        _run(_of_shape(synthetic, compared, levels, max_tokens, hardware), json)
        return
    from transformers import AutoTokenizer  # noqa: F401 (Ctrl-C during it leaves no file yet)

    from peagle.bench.prompts import load_prompts

    given = load_prompts(prompts, limit)
    if chat:
        given = as_chats(given, target)
    _run(_of_models(target, compared.by_method(), given, levels, max_tokens, hardware), json)


@dataclass(frozen=True)
class Benchmark:
    """What is measured, and what its result depends on."""

    workload: "Workload"
    cases: "Sequence[Case]"
    environment: Mapping[str, Any]
    requests: int
    caption: str = ""


def _of_shape(
    synthetic: Synthetic,
    compared: Compared,
    levels: Sequence[int],
    max_tokens: int,
    hardware: Mapping[str, Any],
) -> Benchmark:
    from peagle.bench import report

    methods = compared.run(all_by_default=True)
    cases = compared.cases(methods, synthetic.drafters(methods), levels)
    workload = synthetic.workload(cases, max_tokens, hardware)
    computed_by = report.hardware(workload.device, workload.dtype)
    environment = report.machine() | computed_by | workload.describe()
    requests = sum(case.concurrency for case in cases) * workload.rounds
    return Benchmark(workload, cases, environment, requests, workload.caption)


def _of_models(
    target: str | None,
    compared: Compared,
    prompts: "Sequence[Prompt]",
    levels: Sequence[int],
    max_tokens: int,
    hardware: Mapping[str, Any],
) -> Benchmark:
    from peagle.bench.load import PromptWorkload
    from peagle.bench.pair import choose_pair
    from peagle.bench.report import environment

    methods = compared.run(all_by_default=target is None)
    drafters = {"eagle3": compared.eagle3, "peagle": compared.peagle}
    pair = choose_pair(methods, target, drafters)
    with from_flags():
        workload = PromptWorkload(pair, tuple(prompts), max_tokens, **hardware)
    _check_concurrency(levels, prompts)
    configs = pair.examine()
    cases = compared.cases(methods, configs, levels)
    for warning in pair.beyond_training(configs, max(case.k for case in cases)):
        typer.echo(f"peagle: warning: {warning}", err=True)
    return Benchmark(workload, cases, environment(workload), len(cases) * len(prompts))


def _check_concurrency(levels: Sequence[int], prompts: "Sequence[Prompt]") -> None:
    if max(levels) > len(prompts):
        raise InputError(
            f"--concurrency {max(levels)} needs as many prompts, but there are {len(prompts)}"
        )


def _run(benchmark: Benchmark, json: Path | None) -> None:
    """Run all cases, print the table and write the result, for which the disk may be full."""
    from peagle.bench.load import run_cases
    from peagle.bench.report import full_table, result_file

    told = Console(stderr=json == STDOUT)
    with ExitStack() as files:
        write = files.enter_context(result_file(json))
        with progress_bar("requests", benchmark.requests) as advance:
            runs = list(run_cases(benchmark.workload, benchmark.cases, advance))
        print_table(told, full_table(runs), keys=3)
        if benchmark.caption:
            typer.echo(benchmark.caption, err=told.stderr)
        if json is not None:
            with writing(json, "the table holds what was measured"):
                write({"environment": benchmark.environment, "runs": [r.as_json() for r in runs]})
                files.close()
