"""Which combinations of a swept test `make test` runs: few, in which each value occurs.

The marker `sweep` is for tests whose parameters' combinations are too many for each change; those
that are left out get the marker `nightly`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def at_night(values: Iterable[Any]) -> list[Any]:
    """Values of a parameter that `make test` leaves out."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


Combination = frozenset[tuple[int, str]]
"""Names of values, each behind the number of its `parametrize`."""


def leave_to_the_night(items: Iterable[pytest.Item]) -> None:
    """Mark what `make test` leaves out of sweeps."""
    sweeps = defaultdict(list)
    for item in items:
        marked = {marker.name for marker in item.iter_markers()}
        if isinstance(item, pytest.Function) and "sweep" in marked and "nightly" not in marked:
            sweeps[item.parent, item.originalname].append(item)
    for sweep in sweeps.values():
        kept = representatives([combination(item) for item in sweep])
        for place, item in enumerate(sweep):
            if place not in kept:
                item.add_marker(pytest.mark.nightly)


def combination(item: pytest.Function) -> Combination:
    # a test's name joins them with dashes, which they may hold themselves
    return frozenset(enumerate(item.callspec._idlist))


def representatives(combinations: Sequence[Combination]) -> set[int]:
    """The places of combinations that together have every value: each time the one with most new
    values, of equals the one whose values were taken least, and of those the first."""
    missing, taken, kept = set().union(*combinations), Counter(), set()
    while missing:
        worth = [(len(c & missing), -sum(taken[value] for value in c)) for c in combinations]
        kept.add(place := worth.index(max(worth)))
        missing -= combinations[place]
        taken.update(combinations[place])
    return kept
