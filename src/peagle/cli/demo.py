"""`peagle demo`: one answer as it is written, then a comparison of the methods."""

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from peagle.cli.options import Eagle3, Peagle, Target, Threads, use_threads
from peagle.cli.progress import progress_bar
from peagle.cli.tables import print_table

if TYPE_CHECKING:
    from peagle.bench.load import PromptWorkload, Run
    from peagle.llm import LLM, Chunk

EXAMPLE = """\b
Example:
  peagle demo"""
K = 7
"""About the fastest K of both methods on a CPU; `peagle bench` shows others."""
ANSWER_TOKENS = 160
COMPARED_PROMPTS, COMPARED_TOKENS = 4, 96
ROUNDS, PATIENCE = 3, 15.0
"""The best of `ROUNDS` counts; on a slow machine none begins after `PATIENCE` seconds."""
PROMPT, DRAFTED, OWN = "dim", "green", "bold yellow"
"""Styles: the prompt, accepted drafts, and tokens that the target chose itself."""


def demo(
    target: Target = None, eagle3: Eagle3 = None, peagle: Peagle = None, threads: Threads = None
) -> None:
    """Watch a model write with a drafter's help.

    Then see what that help is worth. Takes under a minute on two CPU cores, without a network.
    """
    from peagle.bench.load import PromptWorkload
    from peagle.bench.pair import METHODS, choose_pair
    from peagle.bench.prompts import load_prompts

    pair = choose_pair(METHODS, target, {"eagle3": eagle3, "peagle": peagle})
    prompts = tuple(load_prompts("bundled", COMPARED_PROMPTS))
    workload = PromptWorkload(pair, prompts, COMPARED_TOKENS, "float32")  # exactly comparable
    pair.check(K)
    use_threads(threads)
    console = Console(highlight=False)
    _show_answer(console, workload)
    _show_comparison(console, workload)


def _show_answer(console: Console, workload: "PromptWorkload") -> None:
    """Stream one completion, each token in the colour of where it came from."""
    llm, prompt = workload.open("peagle", K, concurrency=1), workload.prompts[0]
    drafted, own = ("accepted drafts", DRAFTED), ("the target's own tokens", OWN)
    coloured = console.color_system is not None and not console.no_color
    legend = Text.assemble(" ", drafted, ", ", own) if coloured else ""
    console.print(Text.assemble("P-EAGLE writes:", legend, "\n"))
    console.print(Text(prompt.text, PROMPT), end="", soft_wrap=True)
    params = workload.params(K, ANSWER_TOKENS)
    for chunk in llm.stream(prompt.token_ids(llm.tokenizer), params):
        console.print(_coloured(llm, chunk), end="", soft_wrap=True)
    console.print("\n")


def _coloured(llm: "LLM", chunk: "Chunk") -> Text:
    """A chunk's text: the accepted drafts lead, the target's token is the rest."""
    drafted = llm.tokenizer.decode(chunk.token_ids[: chunk.accepted], skip_special_tokens=True)
    return Text.assemble((chunk.text[: len(drafted)], DRAFTED), (chunk.text[len(drafted) :], OWN))


def _show_comparison(console: Console, workload: "PromptWorkload") -> None:
    from peagle.bench.load import best_of
    from peagle.bench.report import summary_table

    rounds = _rounds(workload)
    print_table(console, summary_table(best_of(rounds)))
    console.print(
        f"greedy, {COMPARED_PROMPTS} prompts x {COMPARED_TOKENS} tokens, one at a time, "
        f"best of {len(rounds)}",
        style=PROMPT,
    )


def _rounds(workload: "PromptWorkload") -> "list[list[Run]]":
    from peagle.bench.load import Case, run_cases

    cases = [Case("none", 0, 1), Case("eagle3", K, 1), Case("peagle", K, 1)]
    start = time.perf_counter()
    rounds: list[list[Run]] = []
    while not rounds or (len(rounds) < ROUNDS and time.perf_counter() - start < PATIENCE):
        what = f"measuring, round {len(rounds) + 1} of up to {ROUNDS}"
        with progress_bar(what, len(cases) * COMPARED_PROMPTS) as advance:
            rounds.append(list(run_cases(workload, cases, advance)))
    return rounds
