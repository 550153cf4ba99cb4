"""What `peagle bench` compares: methods, each with its drafter and Ks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from peagle.cli.groups import Several
from peagle.cli.loading import read_speculation
from peagle.cli.options import BOTH_FORMS, BothDrafters
from peagle.configuration import PositiveInt
from peagle.errors import InputError
from peagle.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from peagle.bench.case import Case, Grid
    from peagle.bench.pair import Pair
    from peagle.drafters.network import NetworkConfig


class Compared(BothDrafters):
    """The choice as the flags give it. Raises `InputError` where they contradict one another."""

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
