"""`peagle demo`: answers as they are written, then a comparison of the methods.

Example:
  peagle demo
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from peagle.cli.options import BothDrafters, Target, Threads, use_threads
from peagle.cli.progress import progress_bar
from peagle.cli.tables import print_table
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.prompts import Prompt
    from peagle.bench.runs import Run
    from peagle.bench.workload import PromptWorkload
    from peagle.completion import Chunk
    from peagle.llm import LLM

K, NODES = 5, 7
"""Drafts of a cycle; P-EAGLE's branch with the bundled pair, and are so many then."""
SHOWN, COMPARED = 2, 8
"""How many of the bundled prompts are answered on the screen, and how many are measured."""
ANSWER_TOKENS = 160
ROUNDS, PATIENCE = 12, 40.0
"""On a slow machine no round begins after `PATIENCE` seconds."""
PROMPT, DRAFTED, OWN = "dim", "green", "bold yellow"
"""Styles: the prompt, accepted drafts, and tokens that the target chose itself."""
WHY = (
    "As many right guesses, or fewer, can be faster: EAGLE-3 guesses one token after the other, K "
    "passes of its drafter; P-EAGLE guesses all K in one."
)
BRANCHES = (
    f"P-EAGLE's guesses branch here: of all texts that may follow, up to {K} tokens long, the "
    f'{NODES} likeliest tokens are checked in one pass ("num_tree_nodes": {NODES}).'
)
FIXED = f"K = {K} is fixed here, for both; `peagle bench --k 3,5,7` measures others."
MODEL = (
    "The model is tiny (15M parameters), has read Python and little else, and is often wrong. Text "
    "that repeats itself is easy to guess, which flatters every drafter; these prompts were chosen "
    "for answers that do not."
)


def demo(*, target: Target, drafters: BothDrafters, threads: Threads = None) -> None:
    """Watch a model write with a drafter's help.

    Then see what that help is worth. Takes under a minute on two CPU cores, without a network.
    """
    from peagle.bench.pair import METHODS, choose_pair
    from peagle.bench.prompts import load_sets
    from peagle.bench.workload import PromptWorkload
    from peagle.config import EngineConfig, SamplingParams

    pair = choose_pair(METHODS, target, drafters.model_dump())
    branches = target is None and drafters.peagle is None
    # each as it is fastest on a CPU: more of EAGLE-3's drafts are right in a tree, and it is slower
    pair = replace(pair, num_tree_nodes=NODES if branches else None, branching=("peagle",))
    answers = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    comparable = EngineConfig(dtype="float32")  # exactly
    workload = PromptWorkload(pair, load_sets(["bundled"], COMPARED), answers, comparable)
    pair.examine()
    use_threads(threads)
    console = Console(highlight=False)
    _show_answers(console, workload)
    _show_comparison(console, _median_runs(workload))
    told = {WHY: True, BRANCHES: branches, FIXED: True, MODEL: target is None}
    for line in ("", *(line for line, shown in told.items() if shown)):
        console.print(line)


def _show_answers(console: Console, workload: "PromptWorkload") -> None:
    """Stream completions, each token in the colour of where it came from."""
    drafted, own = ("accepted drafts", DRAFTED), ("the target's own tokens", OWN)
    coloured = console.color_system is not None and not console.no_color
    legend = Text.assemble(" ", drafted, ", ", own) if coloured else ""
    console.print(Text.assemble("P-EAGLE writes:", legend, "\n"))
    from peagle.bench.case import Setup

    llm = workload.open(Setup("peagle", K, "fixed"), concurrency=1)
    for prompt in workload.sets["bundled"][:SHOWN]:
        console.print(Text(prompt.text, PROMPT), end="", soft_wrap=True)
        for text in _answer(llm, prompt):
            console.print(text, end="", soft_wrap=True)
        console.print("\n")


def _answer(llm: "LLM", prompt: "Prompt") -> Iterator[Text]:
    """The coloured chunks of one completion, up to its prompt's stop text.

    The engine is not told that text: what may begin it would be held back, and colours be late.
    """
    from peagle.config import SamplingParams

    text = ""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, num_speculative_tokens=K)
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


def _median_runs(workload: "PromptWorkload") -> "list[Run]":
    """Let the methods take turns; on a terminal with a bar on stderr."""
    from peagle.bench.case import Grid
    from peagle.bench.pair import METHODS
    from peagle.bench.rounds import open_cases, take_turns
    from peagle.bench.runs import Results, Run

    cases = Grid((1,)).cases(METHODS, {method: [K] for method in METHODS})
    results = Results(cases, comparable=True)
    prompts = len(workload.sets["bundled"])
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


def _show_comparison(console: Console, runs: "list[Run]") -> None:
    """The table, its sentence, and what should keep a reader from believing it."""
    from peagle.bench.tables import summary_table, verdict_sentence
    from peagle.bench.verdict import doubts, judge

    rounds = len(runs[0].rounds)
    print_table(console, summary_table(runs))
    console.print(
        f"Greedy, {COMPARED} functions, one at a time; the methods took turns in "
        f"{rounds} {'rounds' if rounds > 1 else 'round'}: medians, and 95 % intervals of "
        "the speed-up.\n",
        style=PROMPT,
    )
    verdict = judge(runs)
    assert verdict is not None, "three methods ran"
    console.print(verdict_sentence(verdict), style="bold")
    if found := list(doubts(runs)):
        console.print(f"Do not rely on these figures: {'; '.join(found)}.", style="bold red")
