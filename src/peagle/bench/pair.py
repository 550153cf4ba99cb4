"""A target and its drafters: the bundled ones or the user's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peagle.drafters.diagnosis import diagnose
from peagle.errors import InputError
from peagle.models.weights import model_directory
from peagle.pair import bundled

NAMES = {"none": "none", "eagle3": "EAGLE-3", "peagle": "P-EAGLE"}
"""Methods as people write them."""
METHODS = tuple(NAMES)


@dataclass(frozen=True)
class Pair:
    """A target, and the drafter of each method that will run; directories or hub ids."""

    target: str
    drafters: Mapping[str, str]

    def check(self, k: int) -> list[str]:
        """Check every drafter before anything runs.

        Returns a warning for each one trained for fewer than `k` tokens; raises `InputError` with
        all problems of all of them.
        """
        target = model_directory(self.target)
        problems: list[str] = []
        warnings: list[str] = []
        for method, drafter in self.drafters.items():
            found = diagnose(model_directory(drafter), target, parallel=method == "peagle")
            problems += [f"{drafter}: {problem}" for problem in found.problems]
            if found.trained_tokens is not None and k > found.trained_tokens:
                warnings.append(
                    f"K = {k} is beyond the {found.trained_tokens} tokens that {drafter} "
                    "was trained for"
                )
        if problems:
            raise InputError("; ".join(problems))
        return warnings


def choose_pair(
    methods: Sequence[str], target: str | None, drafters: Mapping[str, str | None]
) -> Pair:
    """The directories given, else the bundled ones; a target of the user's needs its drafters."""
    chosen: dict[str, str] = {}
    for method in methods:
        given = drafters.get(method)
        if method != "none" and target is not None and given is None:
            raise InputError(f"method {method} needs a drafter for {target}: give --{method} DIR")
        if method != "none":
            chosen[method] = given or str(bundled(method))
    return Pair(target or str(bundled("target")), chosen)
