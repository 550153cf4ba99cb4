"""What `peagle bench` compares: methods, each with its drafter and Ks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli.loading import read_speculation
from peagle.cli.options import BOTH_FORMS, Eagle3, Peagle, SpeculativeJSON
from peagle.config import LONGEST_MATCH, SHORTEST_MATCH, DrafterFormat, SpeculativeConfig
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.case import Case, Grid
    from peagle.drafters.model import DrafterConfig


@dataclass(frozen=True)
class Compared:
    """The choice as the flags give it. Raises `InputError` where they contradict one another."""

    drafter: Annotated[
        str | None,
        typer.Option(
            help="The one drafter to measure: directory or hub id.",
            show_default="only the bundled target has any",
        ),
    ] = None
    k: Annotated[
        str | None,
        typer.Option(
            "--k", help="Drafts per cycle, one or several: 3,5,7.", show_default="as trained"
        ),
    ] = None
    speculative_config: SpeculativeJSON = None
    eagle3: Eagle3 = None
    peagle: Peagle = None
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods to run: any of none, ngram, eagle3, peagle, mtp; peagle+ngram does both.",
            show_default="none, and those with a drafter",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.speculative_config is not None and (self.drafter, self.k) != (None, None):
            raise InputError(BOTH_FORMS)
        if self._one() is not None and (self.eagle3, self.peagle) != (None, None):
            raise InputError("give either one drafter, or --eagle3 and --peagle to compare two")
        if (one := self._one()) is not None and one.synthetic_acceptance_rates is not None:
            raise InputError(
                "models are measured with the acceptance that they have; leave out "
                "synthetic_acceptance_rates, or give --shape with --synthetic-acceptance"
            )

    def _one(self) -> SpeculativeConfig | None:
        """What is compared with no speculation, where it is one thing."""
        if self.speculative_config is not None:
            return read_speculation(self.speculative_config)
        return None if self.drafter is None else SpeculativeConfig(model=self.drafter)

    @property
    def quantization(self) -> DrafterFormat | None:
        """What the one drafter is rounded to."""
        one = self._one()
        return None if one is None else one.quantization

    @property
    def lookup(self) -> tuple[int, int]:
        """The shortest and longest match of lookups."""
        one = self._one()
        return (one and one.lookup) or (SHORTEST_MATCH, LONGEST_MATCH)

    @property
    def num_tree_nodes(self) -> int | None:
        """Drafts that branch, if any do."""
        one = self._one()
        return None if one is None else one.num_tree_nodes

    @property
    def names_drafters(self) -> bool:
        """Whether a drafter is named."""
        return self._one() is not None or (self.eagle3, self.peagle) != (None, None)

    def by_method(self) -> "Compared":
        """The same with one drafter named by the method that its files are of."""
        from peagle.bench.pair import method_of
        from peagle.drafters.kind import kind_asked

        one = self._one()
        if one is None:
            return self
        k = self.k if one.num_speculative_tokens is None else str(one.num_speculative_tokens)
        by = one.method
        if one.model is not None:
            by = method_of(one.model, kind_asked(one.parallel_drafting))
        method = by if one.lookup is None or by == "ngram" else f"{by}+ngram"
        if one.model is None:
            return Compared(k=k, methods=self.methods or f"none,{method}")
        return Compared(k=k, methods=self.methods or f"none,{method}", **{by: one.model})

    def run(self, all_by_default: bool) -> list[str]:
        """The methods to run, none first."""
        from peagle.bench.pair import METHODS, NAMES

        if self.methods is None:
            drafters = {"none": "", "eagle3": self.eagle3, "peagle": self.peagle}
            return [one for one in METHODS if all_by_default or drafters[one] is not None]
        names = [name.strip() for name in self.methods.split(",")]
        for name in names:
            if name not in NAMES:
                known = ", ".join(NAMES)
                raise InputError(f"--methods {self.methods}: {name!r} is none of {known}")
        return sorted(set(names), key=list(NAMES).index)

    def cases(
        self,
        methods: Sequence[str],
        drafters: "Mapping[str, DrafterConfig]",
        grid: "Grid",
    ) -> "list[Case]":
        """Every combination; K by default as each drafter was trained."""
        from peagle.bench.pair import LOOKUP_K, alone
        from peagle.drafters.kind import MTP

        trained = {by: [config.default_k] for by, config in drafters.items()}
        trained[MTP.method] = [MTP.default_k]
        ks = {name: trained.get(alone(name), [LOOKUP_K]) for name in methods}
        if self.k is not None:
            ks = dict.fromkeys(methods, numbers("--k", self.k))
        return grid.cases(methods, ks)

    def refuse_beside_servers(self) -> None:
        """Raise `InputError` for what a server decides."""
        if self.names_drafters or (self.k, self.methods) != (None, None):
            raise InputError(
                "a server has its own drafter and K; with --url leave out --drafter, --eagle3, "
                "--peagle, --speculative-config, --k and --methods"
            )


def numbers(option: str, text: str) -> list[int]:
    """Distinct positive numbers, from text such as "3,5,7"."""
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"{option} {text}: give whole numbers, such as 3,5,7") from None
    if min(found) < 1:
        raise InputError(f"{option} {text}: every number must be at least 1")
    return found
