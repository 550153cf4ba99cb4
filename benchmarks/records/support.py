"""What ran of each family: a table of `benchmarks/support.yaml`, the results and the families."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from peagle.drafters.kind import KIND_OF_METHOD
from peagle.models.families import FAMILIES
from records.result import UNKNOWN, Result, Strict
from records.store import Results

PLACE = Path(__file__).parents[1] / "support.yaml"
WORDS = {"none": "no drafter", "ngram": "lookup"} | {
    kind.method: kind.name for kind in KIND_OF_METHOD.values()
}
TESTS = "`make test`"
HEAD = ("architecture", "model", "weights", "on", "with", "run", "last", "command")
BEFORE = "before"
"""The claim of such results."""


class Model(Strict):
    """A model in one format of weights, and whose runs are its own."""

    family: str
    model: str
    weights: str
    real: bool = False
    claims: tuple[str, ...] = ()
    """Its results, where these are of no other model."""
    data: str = ""
    """The data of its runs, where that names its size."""

    def methods(self, result: Result) -> set[str]:
        """How a result ran it in our engine, but where it is compared with an earlier commit."""
        if result.claim == BEFORE:
            return set()
        ours = (run for run in result.runs if run.side == "peagle")
        mine = result.claim in self.claims
        return {run.method for run in ours if mine or (self.data and run.data == self.data)}


def support(results: Results) -> str:
    """A row for each model and card, and one for each family of which nothing was measured."""
    models = [Model.model_validate(one) for one in yaml.safe_load(PLACE.read_text("utf-8"))]
    rows = [row for model in models for row in _rows(model, results)]
    measured = {model.family for model in models}
    rows += [
        (f"`{name}`", "tiny, random", "any that it reads", "CPU", "all", "tests only", "", TESTS)
        for name in FAMILIES
        if name not in measured
    ]
    return "".join(_line(row) for row in (HEAD, tuple("---" for _ in HEAD), *rows))


def _rows(model: Model, results: Results) -> Iterator[tuple[str, ...]]:
    cards: dict[str, list[tuple[str, Result]]] = {}
    for name, result in results.items():
        if model.methods(result):
            cards.setdefault(result.machine.device, []).append((name, result))
    for card, found in sorted(cards.items()):
        name, newest = max(found, key=lambda one: (one[1].date, one[0]))
        ran = set[str]().union(*(model.methods(result) for _, result in found))
        yield (
            f"`{model.family}`",
            model.model,
            model.weights,
            "not recorded" if card == UNKNOWN else card.upper() if card == "cpu" else card,
            ", ".join(words for method, words in WORDS.items() if method in ran),
            "real weights" if model.real else "random weights",
            f"[{newest.date[:10]}](../benchmarks/results/{name}.json)",
            "not recorded" if newest.command == UNKNOWN else f"`{newest.command}`",
        )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"
