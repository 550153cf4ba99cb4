"""The flags of `peagle bench`: what it compares, or servers, or a shape; and what it reports."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from peagle.cli.groups import Flags, Positive, Several
from peagle.cli.loading import read_speculation
from peagle.cli.measurement import Benchmark
from peagle.cli.options import BOTH_FORMS, BothDrafters
from peagle.config import EngineConfig, SamplingParams
from peagle.configuration import PositiveInt
from peagle.errors import InputError, lacking
from peagle.files import STDOUT, refuse_existing
from peagle.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from peagle.bench.case import Case, Grid
    from peagle.bench.pair import Pair
    from peagle.bench.prompts import Prompt
    from peagle.bench.report.report import Report
    from peagle.bench.synthetic import SyntheticWorkload
    from peagle.drafters.network import NetworkConfig


class Compared(BothDrafters):
    """What is compared: methods, each with its drafter and Ks.

    Raises `InputError` where the flags contradict one another.
    """

    drafter: str | None = None
    """The one drafter to measure: directory or hub id. Default: only the bundled target has any"""
    k: Several[PositiveInt] | None = None
    """Drafts per cycle, one or several: 3,5,7. Default: as trained"""
    speculative_config: str | None = None
    """vLLM's JSON, in place of --drafter and --k."""
    methods: Several[str] | None = None
    """Methods to run: any of none, ngram, eagle3, peagle, dflash, mtp, or another package's.
    Default: none, and those with a drafter"""

    def model_post_init(self, _: Any) -> None:
        if self.speculative_config is not None and (self.drafter, self.k) != (None, None):
            raise InputError(BOTH_FORMS)
        if self._one is not None and (self.eagle3, self.peagle) != (None, None):
            raise InputError("give either one drafter, or --eagle3 and --peagle to compare two")
        if self._one is not None and self._one.synthetic_acceptance_rates is not None:
            raise InputError(
                "models are measured with the acceptance that they have; leave out "
                "synthetic_acceptance_rates, or give --shape with --synthetic-acceptance"
            )

    @cached_property
    def _one(self) -> SpeculativeConfig | None:
        """What is compared with no speculation, where it is one thing."""
        if self.speculative_config is not None:
            return read_speculation(self.speculative_config)
        return None if self.drafter is None else SpeculativeConfig(model=self.drafter)

    @property
    def names_drafters(self) -> bool:
        """Whether a drafter is named."""
        return self._one is not None or (self.eagle3, self.peagle) != (None, None)

    def run(self, usual: Sequence[str]) -> list[str]:
        """The methods to run, none first; usual: those where none is named."""
        from peagle.bench.pair import measurable

        known = measurable()
        for name in self.methods or ():
            if name not in known:
                raise InputError(f"--methods: {name!r} is none of {', '.join(known)}")
        return sorted(self.methods or usual, key=known.index)

    def models(self, target: str | None) -> "tuple[list[str], Pair]":
        """The methods to run, and their models: one drafter by the method that its files are of."""
        from peagle.bench.pair import METHODS, choose_pair, method_of
        from peagle.drafters.kind import kind_asked

        one, drafters = self._one, self.model_dump(include={"eagle3", "peagle"})
        if one is None:
            usual = [by for by in METHODS if target is None or drafters.get(by, "") is not None]
            methods = self.run(usual)
            return methods, choose_pair(methods, target, drafters)
        by = one.method
        if one.model is not None:
            by = method_of(one.model, kind_asked(one.parallel_drafting))
            drafters[by] = one.model
        methods = self.run(("none", by))
        pair = choose_pair(methods, target, drafters)
        asked = one.model_dump(include={"quantization", "num_tree_nodes"})
        return methods, replace(pair, **asked, lookup=one.lookup or pair.lookup)

    def cases(
        self, methods: Sequence[str], drafters: "Mapping[str, NetworkConfig]", grid: "Grid"
    ) -> "list[Case]":
        """Every combination; K by default as each drafter was trained."""
        from peagle.bench.pair import LOOKUP_K
        from peagle.drafters.kind import MTP

        most = None if self._one is None else self._one.num_speculative_tokens
        given = self.k or (most and (most,))
        trained = {MTP.method: [MTP.default_k]}
        trained |= {by: [config.default_k] for by, config in drafters.items()}
        ks = {name: given or trained.get(name, [LOOKUP_K]) for name in methods}
        return grid.cases(methods, ks)

    def refuse_beside_servers(self) -> None:
        """Raise `InputError` for what a server decides."""
        if self.names_drafters or (self.k, self.methods) != (None, None):
            raise InputError(
                "a server has its own drafter and K; with --url leave out --drafter, --eagle3, "
                "--peagle, --speculative-config, --k and --methods"
            )


class Servers(Flags):
    """Servers in place of models."""

    url: list[str] = []
    """Measure a running server of OpenAI's API, URL or NAME=URL; repeatable. Default: none: an
    engine in this process"""
    request_rate: Several[Positive] = ()
    """With --url: requests a second at random times, one or several: 2,8. Default: --concurrency
    requests in flight"""

    def model_post_init(self, _: Any) -> None:
        if self.request_rate and not self.url:
            raise InputError("--request-rate needs --url")

    def benchmark(
        self,
        model: str | None,
        sets: "Mapping[str, tuple[Prompt, ...]]",
        grid: "Grid",
        sampling: SamplingParams,
        rounds: int,
    ) -> Benchmark:
        """What is measured. Raises `InputError` for a server that does not answer."""
        from peagle.bench.environment import machine, work
        from peagle.bench.server_case import find_servers, run_servers
        from peagle.bench.workload import sampled

        if tuple(grid.draft_lengths) != ("fixed",):
            raise InputError("a server chooses its own draft length; leave out --draft-length")
        named = self._named()
        servers = find_servers(list(named.items()), model)
        cases = grid.servers(list(named), self.request_rate)
        asked = {
            case: [(one, sampled(sampling, case, n, one)) for n, one in enumerate(sets[case.data])]
            for case in cases
        }
        facts = [{"name": s.name, "model": s.model, "version": s.version} for s in servers]
        return Benchmark(
            cases,
            rounds,
            partial(run_servers, servers, cases, asked.__getitem__),
            machine() | {"servers": facts} | work(sets, sampling),
            sum(len(sets[case.data]) for case in cases),
            comparable=all(temperature == 0.0 for temperature in grid.temperatures),
        )

    def _named(self) -> dict[str, str]:
        """URLs by the names of their servers: those given, else the URL's host and port."""
        named: dict[str, str] = {}
        for given in self.url:
            name, found, url = given.partition("=")
            if not found or "/" in name:
                name, url = given.partition("://")[2].rstrip("/").removesuffix("/v1"), given
            if name in named:
                raise InputError(f"--url {given}: two servers are called {name}; give NAME=URL")
            named[name or given] = url
        return named


class Synthetic(Flags):
    """A published size with random weights; without a shape all others must be left out."""

    shape: str | None = None
    """Run a published size, not a model: qwen3-8b, ..."""
    random_weights: bool = False
    """Required by --shape: its weights are random."""
    synthetic_acceptance: float | None = None
    """Acceptance length to simulate with --shape."""
    prompt_tokens: int = 256
    """Prompt length with --shape."""
    routing: str | None = None
    """How alike rows choose experts with --shape: independent, half. Default: the shape's"""
    checkpoint: Path | None = None
    """Read the target of --shape from this directory. Default: it is made"""

    def model_post_init(self, _: Any) -> None:
        given = self.synthetic_acceptance, self.routing, self.checkpoint
        if self.shape is None and (self.random_weights or given != (None, None, None)):
            raise InputError(
                "--random-weights, --synthetic-acceptance, --routing and --checkpoint need --shape"
            )

    def drafters(self, methods: Sequence[str]) -> "dict[str, NetworkConfig]":
        """The drafters of the shape that have sizes of their own. Raises `InputError` for an
        unknown shape."""
        from peagle.bench.shapes import DRAFT_LAYERS, block_config, draft_config, shape_of

        shape = shape_of(self.shape or "")
        if "mtp" in methods and not shape.target.recurrent:
            raise InputError(f"shape {self.shape} has no head of its own; leave out mtp")
        return {
            method: draft_config(shape, method) if method in DRAFT_LAYERS else block_config(shape)
            for method in methods
            if method in ("dflash", *DRAFT_LAYERS)
        }

    def workload(
        self, cases: "Sequence[Case]", params: SamplingParams, engine: EngineConfig
    ) -> "SyntheticWorkload":
        """What all cases share. Raises `InputError` for a size that does not fit the memory."""
        from peagle.bench.synthetic import SyntheticWorkload, require_room

        acceptance = self._acceptance(cases)
        if any(case.temperature for case in cases):
            raise InputError("--shape runs greedy: of random weights only the times mean anything")
        workload = SyntheticWorkload(
            self.shape or "",
            acceptance,
            self.prompt_tokens,
            params.max_tokens,
            engine,
            self.routing,
            self.checkpoint,
        )
        methods = {case.method for case in cases}
        require_room(workload.shape, methods, engine.dtype, engine.device)
        return workload

    def _acceptance(self, cases: "Sequence[Case]") -> float:
        if not self.random_weights:
            raise InputError("--shape has random weights; add --random-weights to confirm")
        length = self.synthetic_acceptance
        if all(case.k == 0 for case in cases):
            return length or 1.0
        if length is None:
            raise InputError(
                "random drafters are never right; add --synthetic-acceptance AL, such as 3.94"
            )
        least = min(case.k for case in cases if case.k)
        if length > least + 1:
            raise InputError(
                f"--synthetic-acceptance {length}: {least} drafts and the bonus make at most "
                f"{least + 1}"
            )
        return length


class Reporting(Flags):
    """What a measurement writes beside the terminal."""

    report: Path | None = None
    """Write a report into this directory: HTML, Markdown, CSV."""
    price_per_hour: Positive | None = None
    """What the machine costs an hour, for the report."""
    target_rate: Positive | None = None
    """Tokens/s that are needed, for the report."""
    result: Path | None = Field(None, alias="json")
    """Write the result to this file; - is stdout."""
    force: bool = False
    """Replace the files of --json and --report."""

    def model_post_init(self, _: Any) -> None:
        for name in ("price_per_hour", "target_rate"):
            if self.report is None and getattr(self, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} is for the report; add --report DIR")
        if str(self.result).startswith("--"):  # the flag that follows it
            raise InputError("--json needs a FILE, or - for stdout; peagle generate's needs none")

    def open(self) -> "Report | None":
        """The report, if one is asked for.

        Raises `InputError` for what exists, unless its files may be replaced.
        """
        if self.result is not None and self.result != STDOUT:
            refuse_existing(self.result, self.force)
        if self.report is None:
            return None
        place = Path(os.path.expanduser(self.report))
        if os.path.exists(place) and not self.force:
            raise InputError(f"{place} exists; give another name, or --force to replace its files")
        try:
            import matplotlib  # noqa: F401 (a long run learns now that it cannot draw)
        except ImportError:
            raise InputError(lacking("--report needs matplotlib", "report")) from None
        from peagle.bench.advice import Price
        from peagle.bench.report.report import Report

        command = shlex.join(["peagle", *sys.argv[1:]])
        return Report(place, Price(self.price_per_hour, self.target_rate), command)
