"""`peagle bench`: compare methods, K and concurrency, or servers, on the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli.compared import Compared, numbers
from peagle.cli.groups import fields, flag_name, group
from peagle.cli.loading import as_chats
from peagle.cli.measurement import Benchmark, Outputs, measure_cases
from peagle.cli.options import SAMPLING, Chat, Hardware, Target, Threads, from_flags, use_threads
from peagle.cli.reporting import Reporting
from peagle.cli.servers import Servers
from peagle.cli.synthetic import Synthetic
from peagle.config import EngineConfig, SamplingParams
from peagle.errors import InputError
from peagle.files import STDOUT, refuse_existing

if TYPE_CHECKING:
    from peagle.bench.case import Grid
    from peagle.bench.prompts import Prompt

EXAMPLE = """\b
Examples:
  peagle bench --k 3,5,7 --concurrency 1,4 --report report
  peagle bench ./target --drafter ./drafter --chat --prompts questions.jsonl
  peagle bench --prompts HumanEval.jsonl.gz --limit 32 --methods none,peagle
  peagle bench --url http://localhost:8000 --url vllm=http://localhost:8001
  peagle bench --shape qwen3-8b --random-weights --synthetic-acceptance 3.94 --k 7"""
BUNDLED = ("bundled",)
SAMPLED = {name: SAMPLING[name] for name in ("max_tokens", "top_k", "top_p", "min_p", "seed")} | {
    "ignore_eos": "Write on past the end of text, unless a prompt says where its answer ends."
}
ROUNDS = 6
"""The fewest of which a median has an interval."""


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
        list[str],
        typer.Option(help="bundled, or a file: .jsonl, .jsonl.gz, .parquet, .txt; repeatable."),
    ] = list(BUNDLED),  # noqa: B006 (typer copies it)
    chat: Chat = False,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Use only this many prompts of each file, the first ones.",
            show_default="all of them",
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight, one or several: 1,8.")
    ] = "1",
    draft_length: Annotated[
        str, typer.Option(help="fixed, auto (as serve: as many, up to K, as are fastest) or both.")
    ] = "fixed",
    temperature: Annotated[str, typer.Option(help="0 is greedy; one or several: 0,0.7.")] = "0",
    sampling: Annotated[dict[str, Any], fields(SamplingParams, SAMPLED, ignore_eos=True)],
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each case, in turns.")] = ROUNDS,
    servers: Annotated[Servers, group(Servers)],
    reporting: Annotated[Reporting, group(Reporting)],
    json: Annotated[
        Path | None,
        typer.Option(
            help="Write the result to this file; - is stdout.",
            show_default="none",
            callback=_no_flag,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the files of --json and --report.")
    ] = False,
    synthetic: Annotated[Synthetic, group(Synthetic)],
    hardware: Hardware,
    threads: Threads = None,
) -> None:
    """Measure speed, acceptance and latency.

    Cases take turns, so that a machine's bad moments fall on all. All inputs are checked before the
    first run; what was measured is kept when it is stopped.
    """
    if json is not None and json != STDOUT:
        refuse_existing(json, force)
    outputs = Outputs(json, reporting.report_into(force))
    use_threads(threads)
    levels = numbers("--concurrency", concurrency)
    with from_flags():
        params = SamplingParams(**sampling)
    grid = _grid(levels, temperature, draft_length)
    if synthetic.shape is not None:
        if target or compared.names_drafters or chat or servers.url or prompts != [*BUNDLED]:
            raise InputError(
                "--shape makes its own models and prompts; leave out targets, drafters, --chat, "
                "--prompts and --url"
            )
        if hardware.get("lora"):
            raise InputError("--shape has random weights, into which no adapter is merged")
        grid = replace(grid, data=(synthetic.shape,))  # whose prompts are random
        measure_cases(_of_shape(synthetic, compared, grid, params, rounds, hardware), outputs)
        return
    sets = _prompt_sets(prompts, limit, chat, target, servers)
    grid = replace(grid, data=tuple(sets))
    if servers.url:
        compared.refuse_beside_servers()
        _refuse_beside_servers(hardware)
        if servers.request_rate is None:
            _check_concurrency(levels, sets)
        measure_cases(servers.benchmark(target, sets, grid, params, rounds), outputs)
        return
    servers.refuse_alone()
    _check_concurrency(levels, sets)
    benchmark = _of_models(target, compared, sets, grid, params, rounds, hardware)
    measure_cases(benchmark, outputs)


def _refuse_beside_servers(hardware: Mapping[str, Any]) -> None:
    """Raise `InputError` for what a server runs on, which is its own."""
    with from_flags():
        asked = EngineConfig(**hardware)
    usual = EngineConfig()
    given = [flag_name(name) for name in hardware if getattr(asked, name) != getattr(usual, name)]
    if given:
        raise InputError(f"a server was started with its own; with --url leave out {given[0]}")


def _grid(levels: Sequence[int], temperature: str, draft_length: str) -> "Grid":
    from peagle.bench.case import Grid

    with from_flags():
        modes = [EngineConfig(draft_length=mode).draft_length for mode in _parts(draft_length)]
        try:
            numbers = [float(part) for part in _parts(temperature)]
        except ValueError:
            raise InputError(f"--temperature {temperature}: give numbers, such as 0,0.7") from None
        heats = [SamplingParams(temperature=number).temperature for number in numbers]
    return Grid(levels, temperatures=list(dict.fromkeys(heats)), draft_lengths=modes)


def _parts(text: str) -> list[Any]:
    """The distinct parts of a list in a flag."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _prompt_sets(
    sources: Sequence[str], limit: int | None, chat: bool, target: str | None, servers: Servers
) -> "dict[str, tuple[Prompt, ...]]":
    from transformers import AutoTokenizer  # noqa: F401 (Ctrl-C during it leaves no file yet)

    from peagle.bench.prompts import load_sets

    sets = load_sets(sources, limit)
    if not chat:
        return sets
    if servers.url:  # whose templates nobody sees
        return {name: tuple(one.as_chat() for one in given) for name, given in sets.items()}
    return {name: tuple(as_chats(given, target)) for name, given in sets.items()}


def _of_shape(
    synthetic: Synthetic,
    compared: Compared,
    grid: "Grid",
    params: SamplingParams,
    rounds: int,
    hardware: Mapping[str, Any],
) -> Benchmark:
    from peagle.bench import environment
    from peagle.bench.pair import looks_up
    from peagle.bench.rounds import run_engines

    methods = compared.run(all_by_default=True)
    if any(map(looks_up, methods)):
        raise InputError("random text repeats nothing; leave ngram out of --methods with --shape")
    cases = compared.cases(methods, synthetic.drafters(methods), grid)
    workload = synthetic.workload(cases, params, hardware)
    return Benchmark(
        cases,
        rounds,
        partial(run_engines, workload, cases),
        environment.machine() | environment.computed_by(workload) | workload.describe(),
        sum(case.concurrency for case in cases),
        workload.comparable,
        workload.caption,
    )


def _of_models(
    target: str | None,
    compared: Compared,
    sets: "Mapping[str, tuple[Prompt, ...]]",
    grid: "Grid",
    params: SamplingParams,
    rounds: int,
    hardware: Mapping[str, Any],
) -> Benchmark:
    from peagle.bench.environment import environment
    from peagle.bench.pair import choose_pair
    from peagle.bench.rounds import run_engines
    from peagle.bench.workload import PromptWorkload

    quantization, lookup, nodes = compared.quantization, compared.lookup, compared.num_tree_nodes
    compared = compared.by_method()
    methods = compared.run(all_by_default=target is None)
    drafters = {"eagle3": compared.eagle3, "peagle": compared.peagle}
    pair = choose_pair(methods, target, drafters)
    pair = replace(pair, quantization=quantization, lookup=lookup, num_tree_nodes=nodes)
    with from_flags():
        EngineConfig(**hardware)
    workload = PromptWorkload(pair, sets, params, **hardware)
    configs = pair.examine()
    cases = compared.cases(methods, configs, grid)
    for warning in pair.beyond_training(configs, max(case.k or 0 for case in cases)):
        typer.echo(f"peagle: warning: {warning}", err=True)
    requests = sum(len(sets[case.data]) for case in cases)
    start = partial(run_engines, workload, cases)
    return Benchmark(cases, rounds, start, environment(workload), requests)


def _check_concurrency(levels: Sequence[int], sets: "Mapping[str, Sequence[Prompt]]") -> None:
    fewest = min(map(len, sets.values()))
    if max(levels) > fewest:
        raise InputError(
            f"--concurrency {max(levels)} needs as many prompts, but there are {fewest}"
        )
