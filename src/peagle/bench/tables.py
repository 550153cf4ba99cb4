"""Tables and sentences for the terminal."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from peagle.bench.case import Case
from peagle.bench.runs import Run
from peagle.bench.verdict import Ranking, Ratio, reference, speed_up

LEGEND = (
    "C: requests in flight; with /s, requests a second. AL, acceptance length: tokens of a cycle "
    "that drafted."
)


def summary_table(runs: Sequence[Run]) -> Table:
    """One row per method: speed with its interval, acceptance, and whether the text is the same."""
    keys = {name: column for name, column in _keys(runs).items() if name != "C"}
    return _table(runs, keys, "acceptance\nlength", ())


def full_table(runs: Sequence[Run]) -> Table:
    """One row per case."""
    return _table(runs, _keys(runs), "AL", ("ttft_ms", "itl_ms", "e2e_ms"))


def _table(
    runs: Sequence[Run], keys: Mapping[str, Sequence[str]], length: str, latencies: Sequence[str]
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    medians = [f"{name.removesuffix('_ms').upper()} ms\np50" for name in latencies]
    for name in (*keys, "tokens/s", "speed-up", length, *medians, "same\ntext"):
        first, left = not table.columns, not table.columns or name == "speed-up"
        table.add_column(name, no_wrap=first, justify="left" if left else "right")
    for number, run in enumerate(runs):
        ratio = speed_up(run, runs)
        times = [getattr(run.measures, name).p50 for name in latencies]
        table.add_row(
            *(escape(column[number]) for column in keys.values()),
            f"{run.measures.otps:.1f}",
            "-" if ratio is None else ratio_text(ratio),
            length_text(run),
            *(f"{time:.1f}" if time else "-" for time in times),
            _same(run, runs),
        )
    return table


def run_line(run: Run, turn: int) -> str:
    """One round of a case, for those who wait."""
    length = "" if run.measures.acceptance_length is None else f", AL {length_text(run)}"
    return f"round {turn}, {case_text(run.case)}: {run.measures.otps:.1f} tokens/s{length}"


def case_text(case: Case) -> str:
    """A case in words."""
    return f"{case.label}, {case.load.words}"


def ratio_text(ratio: Ratio) -> str:
    """A ratio and its interval: 1.63x (1.58-1.68)."""
    return f"{ratio.median:.2f}x{_interval(ratio)}"


def verdict_sentence(verdict: Ranking) -> str:
    """Which method is the fastest and by how much, or that this cannot be told."""
    first, second = (
        "no speculation" if run.case.undrafted else run.case.with_k(" at ")
        for run in (verdict.first, verdict.second)
    )
    lead = verdict.lead
    times = f"{lead.median:.2f} times as fast as {second}{_interval(lead)}"
    if verdict.clear:
        return f"Fastest on this machine: {first}, {times}."
    if lead.bounded:  # medians of rounds and of their ratios may point to different sides
        times = f"{lead.low:.2f} to {lead.high:.2f} times as fast as {second}"
        return f"No clear winner on this machine: {first} may be {times}."
    if lead.median < 1.0:  # though its speed-up was larger
        times = f"as fast as {second}"
    return f"No clear winner on this machine: {first} was {times}, in too few rounds to say so."


def branching_text(runs: Sequence[Run]) -> str:
    """Whose drafts branch, in a sentence; nothing where nobody's do."""
    whose = [f"{run.case.label}, {run.case.load.shown} in flight" for run in runs if run.branches]
    return f"Drafts branch: {'; '.join(dict.fromkeys(whose))}." if whose else ""


def k_text(case: Case) -> str:
    """Its K: "7", at most 7 by load as "≤7", none as "-"."""
    at_most = "≤" if case.draft_length == "auto" else ""
    return f"{at_most}{case.k}" if case.k else "-"


def _interval(ratio: Ratio) -> str:
    """In parentheses; nothing where it has no bounds or no width."""
    low, high = f"{ratio.low:.2f}", f"{ratio.high:.2f}"
    return f" ({low}-{high})" if ratio.bounded and low != high else ""


def _keys(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The columns that say which case each row is: those that differ, and always C."""
    cases = [run.case for run in runs]
    found = {
        "method": [case.name for case in cases],
        "C": [case.load.shown for case in cases],
        "K": [k_text(case) for case in cases],
        "prompts": [case.data for case in cases],
        "T": [f"{case.temperature:g}" for case in cases],
    }
    shown = {"method", "C"} if all(case.is_server for case in cases) else {"method", "C", "K"}
    return {name: texts for name, texts in found.items() if name in shown or len({*texts}) > 1}


def length_text(run: Run) -> str:
    """AL; beside it tokens per cycle, where some cycles drafted nothing: "4.20 (3.91 a cycle)"."""
    length, emitted = run.measures.acceptance_length, run.measures.tokens_per_cycle
    if length is None:
        return "-"
    paused = emitted is not None and emitted < length - 0.005
    return f"{length:.2f} ({emitted:.2f} a cycle)" if paused else f"{length:.2f}"


def same_text(run: Run, runs: Sequence[Run]) -> str:
    """Whether its text is the reference's; of the reference itself, that its own texts differ."""
    if run.same_text is False and reference(run, runs) is run:
        return "varies"
    return {True: "yes", False: "no", None: "-"}[run.same_text]


def varying_text(runs: Sequence[Run]) -> str:
    """Why nobody's text can be the same, in a sentence; nothing where it can."""
    whose = [run.case.label for run in runs if same_text(run, runs) == "varies"]
    told = f"{'; '.join(dict.fromkeys(whose))} wrote different text in different rounds"
    return f"{told}, so that no other text can be the same." if whose else ""


def _same(run: Run, runs: Sequence[Run]) -> str:
    told = same_text(run, runs)
    return f"[red]{told}[/]" if told == "no" else told
