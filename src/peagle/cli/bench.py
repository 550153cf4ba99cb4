"""`peagle bench`: compare methods, K and concurrency, or servers, on the same prompts.

Examples:
  peagle bench --k 3,5,7 --concurrency 1,4 --report report
  peagle bench ./target --drafter ./drafter --chat --prompts questions.jsonl
  peagle bench --prompts HumanEval.jsonl.gz --limit 32 --methods none,peagle
  peagle bench --url http://localhost:8000 --url vllm=http://localhost:8001
  peagle bench --shape qwen3-8b --random-weights --synthetic-acceptance 3.94 --k 7
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli.bench_flags import Compared, Reporting, Servers, Synthetic
from peagle.cli.groups import Flags, Several, fields, flag_name, from_flags
from peagle.cli.loading import as_chats
from peagle.cli.measurement import Benchmark, measure_cases
from peagle.cli.options import Hardware, Target, Threads, use_threads
from peagle.config import DraftLengthMode, EngineConfig, SamplingParams, Temperature
from peagle.configuration import PositiveInt
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.case import Grid
    from peagle.bench.prompts import Prompt

BUNDLED = ("bundled",)
Sampling = Annotated[dict[str, Any], fields(SamplingParams, "max_tokens top_k top_p min_p seed")]


class Questions(Flags):
    """What is asked, how, and how often."""

    prompts: list[str] = [*BUNDLED]
    """bundled, or a file: .jsonl, .jsonl.gz, .parquet, .txt; repeatable."""
    chat: bool = False
    """Render each prompt as a user's turn."""
    limit: int | None = None
    """Use only this many prompts of each file, the first ones. Default: all of them"""
    concurrency: Several[PositiveInt] = (1,)
    """Requests in flight, one or several: 1,8."""
    draft_length: Several[DraftLengthMode] = ("fixed",)
    """fixed, auto (as serve: as many, up to K, as are fastest) or one after another: fixed,auto."""
    temperature: Several[Temperature] = (0,)
    """0 is greedy; one or several: 0,0.7."""
    ignore_eos: bool = True
    """Write on past the end of text, unless a prompt says where its answer ends."""
    rounds: PositiveInt = 6
    """Runs of each case, in turns; of fewer than six a median has no interval."""

    def grid(self, data: Sequence[str]) -> "Grid":
        """Every load and way to draft, over some sets of prompts."""
        from peagle.bench.case import Grid

        return Grid(self.concurrency, data, self.temperature, self.draft_length)

    def sets(self, target: str | None, of_servers: bool) -> "dict[str, tuple[Prompt, ...]]":
        """The prompts; of_servers: whose chat templates nobody sees."""
        from transformers import AutoTokenizer  # noqa: F401 (Ctrl-C during it leaves no file yet)

        from peagle.bench.prompts import load_sets

        sets = load_sets(self.prompts, self.limit)
        if not self.chat:
            return sets
        if of_servers:
            return {name: tuple(one.as_chat() for one in given) for name, given in sets.items()}
        return {name: tuple(as_chats(given, target)) for name, given in sets.items()}

    def check_concurrency(self, sets: "Mapping[str, Sequence[Prompt]]") -> None:
        """Raise `InputError` for more requests in flight than there are."""
        most, fewest = max(self.concurrency), min(map(len, sets.values()))
        if most > fewest:
            raise InputError(f"--concurrency {most} needs as many prompts, but there are {fewest}")


def bench(
    *,
    target: Target,
    compared: Compared,
    work: Questions,
    sampling: Sampling,
    servers: Servers,
    reporting: Reporting,
    synthetic: Synthetic,
    hardware: Hardware,
    threads: Threads = None,
) -> None:
    """Measure speed, acceptance and latency.

    Cases take turns, so that a machine's bad moments fall on all. All inputs are checked before the
    first run; what was measured is kept when it is stopped.
    """
    report = reporting.open()
    use_threads(threads)
    with from_flags():
        params = SamplingParams(**sampling, ignore_eos=work.ignore_eos)
        engine = EngineConfig(**hardware)
    if synthetic.shape is not None:
        own_prompts = work.prompts != [*BUNDLED]
        if any((target, compared.names_drafters, work.chat, servers.url, own_prompts)):
            raise InputError(
                "--shape makes its own models and prompts; leave out targets, drafters, --chat, "
                "--prompts and --url"
            )
        if engine.lora:
            raise InputError("--shape has random weights, into which no adapter is merged")
        benchmark = _of_shape(synthetic, compared, work, params, engine)
    elif servers.url:
        sets = work.sets(target, of_servers=True)
        compared.refuse_beside_servers()
        _refuse_beside_servers(engine, hardware)
        if not servers.request_rate:
            work.check_concurrency(sets)
        elif work.concurrency != Questions().concurrency:
            raise InputError("--request-rate takes the place of --concurrency; give one of them")
        benchmark = servers.benchmark(target, sets, work.grid([*sets]), params, work.rounds)
    else:
        sets = work.sets(target, of_servers=False)
        work.check_concurrency(sets)
        benchmark = _of_models(target, compared, work, sets, params, engine)
    measure_cases(benchmark, reporting.result, report)


def _refuse_beside_servers(asked: EngineConfig, flags: Mapping[str, Any]) -> None:
    """Raise `InputError` for what a server runs on, which is its own."""
    usual = EngineConfig()
    given = [flag_name(name) for name in flags if getattr(asked, name) != getattr(usual, name)]
    if given:
        raise InputError(f"a server was started with its own; with --url leave out {given[0]}")


def _of_shape(
    synthetic: Synthetic,
    compared: Compared,
    work: Questions,
    params: SamplingParams,
    engine: EngineConfig,
) -> Benchmark:
    from peagle.bench import environment
    from peagle.bench.pair import METHODS
    from peagle.bench.rounds import run_engines
    from peagle.drafters.kind import KIND_OF_METHOD

    methods = compared.run(METHODS)
    if readers := ", ".join(each for each in methods if each not in ("none", *KIND_OF_METHOD)):
        raise InputError(f"random text repeats nothing; leave {readers} out with --shape")
    grid = work.grid([str(synthetic.shape)])  # whose prompts are random
    cases = compared.cases(methods, synthetic.drafters(methods), grid)
    workload = synthetic.workload(cases, params, engine)
    return Benchmark(
        cases,
        work.rounds,
        partial(run_engines, workload, cases),
        environment.machine() | environment.computed_by(engine) | workload.describe(),
        sum(case.concurrency for case in cases),
        comparable=False,
        caption=workload.caption,
    )


def _of_models(
    target: str | None,
    compared: Compared,
    work: Questions,
    sets: "Mapping[str, tuple[Prompt, ...]]",
    params: SamplingParams,
    engine: EngineConfig,
) -> Benchmark:
    from peagle.bench.environment import environment
    from peagle.bench.rounds import run_engines
    from peagle.bench.workload import PromptWorkload

    methods, pair = compared.models(target)
    workload, configs = PromptWorkload(pair, sets, params, engine), pair.examine()
    cases = compared.cases(methods, configs, work.grid([*sets]))
    for warning in pair.beyond_training(configs, max(case.k or 0 for case in cases)):
        typer.echo(f"peagle: warning: {warning}", err=True)
    requests = sum(len(sets[case.data]) for case in cases)
    start = partial(run_engines, workload, cases)
    return Benchmark(cases, work.rounds, start, environment(workload), requests)
