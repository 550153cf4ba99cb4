"""What a finished drafter's acceptance length means, and the command to run next."""

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peagle.train.recipe import Recipe

HELPS, WORTH_SERVING = 1.3, 2.0
"""Acceptance lengths from which a drafter gains time where few requests run, and where many do:
what a cycle costs in plain steps there, with a margin (docs/first-drafter.md)."""
NEARLY_ALL = 0.8
"""Share of the longest possible acceptance length from which K is what limits it."""
ALIKE = 0.8
"""The least share of the estimate that the engine's acceptance length has where the target writes
text like that of the data."""
SYMPTOMS = " (symptoms and remedies: docs/first-drafter.md)"
URL = "http://localhost:8000"
"""Where vLLM listens by default."""
FEW = 3
"""Drafts that are worth trying besides all of K."""


@dataclass(frozen=True)
class Verdict:
    """On one drafter, at the K it was trained for."""

    meaning: str
    command: str
    """What to run next."""

    def __str__(self) -> str:
        return f"{self.meaning}\nnext: {self.command}"


def judge_served(recipe: "Recipe", estimated: float, measured: float | None) -> Verdict:
    """Judge a drafter that vLLM is to run, by a server's AL or by the estimate alone."""
    from peagle.models.vllm_support import serving_flags
    from peagle.models.weights import model_directory

    known, said = (measured, "") if measured is not None else (estimated, "estimated ")
    judged = judge(recipe, estimated, known, said)
    flags = serving_flags(model_directory(recipe.target))
    if flags is None:
        return Verdict(judged.meaning, _check(recipe))
    serve = [*shlex.split(_serve(recipe)), "--engine", "vllm", *flags]
    bench = ["peagle", "bench", "--url", URL, "--chat", "--prompts", "FILE", "--no-ignore-eos"]
    commands = f"{shlex.join(serve)}\nthen: {shlex.join(bench)}"
    return Verdict(judged.meaning, commands)


def judge(recipe: "Recipe", estimated: float, measured: float, how: str = "") -> Verdict:
    """Judge a recipe's drafter by its estimated acceptance length and by the engine's.

    how: said before the latter.
    """
    most = recipe.num_speculative_tokens + 1
    said = f"{how}AL {measured:.2f} of at most {most}"
    if measured < HELPS:
        return Verdict(f"{said}: its drafts are hardly ever right{SYMPTOMS}", _check(recipe))
    if measured < ALIKE * estimated:
        data = f"the target writes other text than the data holds{SYMPTOMS}"
        return Verdict(f"{said}, where {estimated:.2f} was estimated: {data}", _check(recipe))
    if measured >= NEARLY_ALL * most:
        return Verdict(f"{said}: a larger K would give more", _serve(recipe))
    if measured < WORTH_SERVING:
        helps = (
            "it helps where few requests run; measure it with prompts of your own (FILE; where its "
            "prompts are no messages, add --chat for a model of chats)"
        )
        return Verdict(f"{said}: {helps}", _bench(recipe))
    return Verdict(f"{said}: worth serving", _serve(recipe))


def _check(recipe: "Recipe") -> str:
    return shlex.join(["peagle", "check", recipe.output, "--target", recipe.target])


def _bench(recipe: "Recipe") -> str:
    """At few drafts, too: those that are seldom right cost time."""
    models = [recipe.target, "--drafter", recipe.output]
    ks = sorted({min(recipe.num_speculative_tokens, FEW), recipe.num_speculative_tokens})
    cases = ["--k", ",".join(map(str, ks)), "--prompts", "FILE", "--no-ignore-eos"]
    return shlex.join(["peagle", "bench", *models, *cases])


def _serve(recipe: "Recipe") -> str:
    return shlex.join(["peagle", "serve", recipe.target, "--drafter", recipe.output])
