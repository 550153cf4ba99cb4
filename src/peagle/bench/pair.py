"""A target and its drafters: the bundled ones or the user's own."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from peagle.drafters.config_file import kind_of
from peagle.drafters.diagnosis import diagnose
from peagle.drafters.kind import DFLASH, EAGLE3, KIND_OF_METHOD, KINDS, MTP, PEAGLE, Kind
from peagle.drafters.methods import kind_shown
from peagle.drafters.network import NetworkConfig
from peagle.errors import InputError
from peagle.models.weights import model_directory
from peagle.pair import or_bundled
from peagle.speculative_config import (
    LONGEST_MATCH,
    SHORTEST_MATCH,
    DrafterFormat,
    SpeculativeConfig,
    known_methods,
)

NAMES = {"none": "none", "ngram": "n-gram"} | {
    kind.method: kind.name for kind in (EAGLE3, PEAGLE, DFLASH, MTP)
}
"""Methods as people write them."""
METHODS = ("none", "eagle3", "peagle")
"""Those that are compared where nobody says which."""
LOOKUP_K = 8
"""K of a lookup without a drafter."""


def measurable() -> list[str]:
    """What can be compared, in order: the methods here, then those that other packages add."""
    return list(dict.fromkeys((*NAMES, *known_methods())))


@dataclass(frozen=True)
class Pair:
    """A target, and the drafters of the methods that will run; directories or hub ids."""

    target: str
    drafters: Mapping[str, str]
    quantization: DrafterFormat | None = None
    """What the drafters are rounded to when they are loaded."""
    lookup: tuple[int, int] = (SHORTEST_MATCH, LONGEST_MATCH)
    """Tokens of a match, where drafts are looked up."""
    num_tree_nodes: int | None = None
    """Drafts of a cycle that branch; as in `SpeculativeConfig`."""
    branching: Collection[str] = tuple(KIND_OF_METHOD)
    """The methods that these are for."""

    def speculation(self, method: str, k: int) -> SpeculativeConfig | None:
        """How a method speculates."""
        if method == "none":
            return None
        kind = KIND_OF_METHOD.get(method)
        shortest, longest = self.lookup if method == "ngram" else (None, None)
        return SpeculativeConfig(
            method="eagle3" if kind in KINDS else method,
            model=self.drafters.get(method),
            num_speculative_tokens=k,
            parallel_drafting=kind.parallel_drafting if kind in KINDS else None,
            quantization=self.quantization if method in self.drafters else None,
            num_tree_nodes=self.num_tree_nodes if method in self.branching else None,
            prompt_lookup_min=shortest,
            prompt_lookup_max=longest,
        )

    def examine(self) -> dict[str, NetworkConfig]:
        """Each method's drafter. Raises `InputError` with all problems of all of them."""
        target = model_directory(self.target)
        problems: list[str] = []
        configs: dict[str, NetworkConfig] = {}
        for method, drafter in self.drafters.items():
            found = diagnose(model_directory(drafter), target, KIND_OF_METHOD[method])
            problems += [f"{drafter}: {problem}" for problem in found.problems]
            if found.config is not None:
                configs[method] = found.config
        if problems:
            raise InputError("; ".join(problems))
        return configs

    def beyond_training(self, configs: Mapping[str, NetworkConfig], k: int) -> list[str]:
        """A warning for each drafter that was trained for fewer than `k` tokens."""
        return [
            f"K = {k} is beyond the {config.trained_tokens} tokens that {self.drafters[method]} "
            "was trained for"
            for method, config in configs.items()
            if config.trained_tokens is not None and k > config.trained_tokens
        ]


def method_of(drafter: str, kind: Kind | None = None) -> str:
    """The method that a drafter's files are of, if it is not said; raises `InputError`."""
    place = model_directory(drafter)
    return (kind_shown(place) or kind or kind_of(place)).method


def choose_pair(
    methods: Sequence[str], target: str | None, drafters: Mapping[str, str | None]
) -> Pair:
    """The directories given, else the bundled ones; a target of the user's needs its drafters."""
    chosen: dict[str, str] = {}
    for method in (each for each in methods if each in KIND_OF_METHOD):
        given = drafters.get(method)
        if given is None and method == MTP.method:
            continue  # the target's files have it
        if given is None and method == DFLASH.method:
            raise InputError(f"method {method} needs a drafter: give --drafter DIR")
        if target is not None and given is None:
            raise InputError(f"method {method} needs a drafter for {target}: give --{method} DIR")
        chosen[method] = or_bundled(given, method)
    return Pair(or_bundled(target, "target"), chosen)
