"""A measurement as it runs: rows as they come, and at its end, however it ends, what they say."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from peagle.cli.progress import progress_bar
from peagle.cli.tables import print_table
from peagle.errors import InputError
from peagle.files import STDOUT, rewritten_file, writing

if TYPE_CHECKING:
    from peagle.bench.case import Case, Load
    from peagle.bench.report.report import Report
    from peagle.bench.runs import Failure, Results, Run
    from peagle.bench.verdict import Ranking

Tick = Callable[[], None]
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Benchmark:
    """What is measured, and what its result depends on."""

    cases: "Sequence[Case]"
    rounds: int
    start: "Callable[[int, Tick, Warn], Iterator[Run | Failure]]"
    """Runs all cases for so many rounds; calls the first function after each request, and the
    second with what a reader must know."""
    environment: Mapping[str, Any]
    requests: int
    """The requests of all cases together, in one round."""
    comparable: bool = True
    """Whether all cases should write the same."""
    caption: str = ""


def measure_cases(benchmark: Benchmark, file: Path | None, report: "Report | None") -> None:
    """Measure, print the table, write the result after every run and the report at the end.

    What was measured is kept whatever happens then. Raises `InputError` for what failed.
    """
    from peagle.bench.runs import Results

    results = Results(benchmark.cases, benchmark.comparable)
    with ExitStack() as files:
        if report is not None:
            files.enter_context(report.directory())
        kept = Kept(benchmark, results, file, report)
        if file is not None and file != STDOUT:
            kept.write = files.enter_context(rewritten_file(file))
        try:
            _follow(benchmark, kept)
        finally:
            kept.show()
    kept.complain()


@dataclass
class Kept:
    """What was measured so far, and what went wrong."""

    benchmark: Benchmark
    results: "Results"
    file: Path | None
    report: "Report | None"
    write: Callable[[str], None] | None = None
    """Gives the result file its text."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the figures must know."""
    failures: "list[Failure]" = field(default_factory=list)
    unwritten: InputError | None = None

    def note(self, text: str) -> None:
        """Tell at once, and in the report."""
        if text not in self.notes:
            self.notes.append(text)
            typer.echo(f"peagle: warning: {text}", err=True)

    def add(self, run: "Run", turn: int) -> None:
        """Keep a run and say so; a disk that is full costs the file but not the measurement."""
        from peagle.bench.tables import run_line

        self.results.add(run)
        typer.echo(run_line(run, turn), err=True)
        if self.file is None or self.write is None or self.unwritten is not None:
            return
        try:
            with writing(self.file, "the table holds what was measured"):
                self.write(self.as_json())
        except InputError as error:
            self.unwritten = error

    def as_json(self) -> str:
        """The result file."""
        from peagle.bench.verdict import doubts

        runs = self.results.medians()
        result = {
            "environment": dict(self.benchmark.environment),
            "notes": self.notes,
            "runs": [run.as_json() for run in runs],
            "verdicts": [
                {**asdict(load), "verdict": text, **verdict.as_json()}
                for load, verdict, text in verdicts(runs)
            ],
            "doubts": list(doubts(runs)),
        }
        return json.dumps(result, indent=1) + "\n"

    def show(self) -> None:
        """Print what was measured, if anything was, and write the report."""
        runs = self.results.medians()
        if not runs:
            return
        console = Console(stderr=self.file == STDOUT, highlight=False)
        show_runs(console, runs)
        if self.benchmark.caption:
            console.print(self.benchmark.caption)
        if self.report is not None:
            with writing(self.report.place, "the table holds what was measured"):
                about = self.benchmark.environment
                self.report.write(about, runs, self.notes, self.failures)
            console.print(f"The report: {self.report.page}", soft_wrap=True)
        if self.file == STDOUT:
            typer.echo(self.as_json(), nl=False)

    def complain(self) -> None:
        """Raise `InputError` for what went wrong."""
        from peagle.bench.tables import case_text

        if self.unwritten is not None:
            raise self.unwritten
        if self.failures:
            told = (f"{case_text(one.case)}: {one.reason}" for one in self.failures)
            raise InputError("; ".join(told))


def _follow(benchmark: Benchmark, kept: Kept) -> None:
    """Run all rounds."""
    from peagle.bench.runs import Failure

    turns: dict[Case, int] = {}
    total, console = benchmark.requests * benchmark.rounds, Console(stderr=True)
    with progress_bar(console, "requests", total, transient=True) as update:
        for done in benchmark.start(benchmark.rounds, partial(update, advance=1), kept.note):
            if isinstance(done, Failure):
                kept.failures.append(done)
            else:
                turns[done.case] = turns.get(done.case, 0) + 1
                kept.add(done, turns[done.case])


def show_runs(console: Console, runs: "Sequence[Run]") -> None:
    """The table of median runs, what they decide, and why they should not be believed."""
    from peagle.bench.tables import LEGEND, branching_text, full_table, varying_text
    from peagle.bench.verdict import bounded, doubts

    print_table(console, full_table(runs))
    rounds = max(len(run.rounds) for run in runs)
    intervals = ", and 95 % intervals of the speed-up" if bounded(rounds) else ""
    console.print(f"Medians of {rounds} rounds{intervals}." if rounds > 1 else "One round.")
    plain = partial(console.print, soft_wrap=True, markup=False)  # names may hold brackets
    plain(LEGEND)
    for told in filter(None, (branching_text(runs), varying_text(runs))):
        plain(told)
    for _, _, sentence in verdicts(runs):
        plain(sentence)
    if found := list(doubts(runs)):
        plain(f"Do not rely on these figures: {'; '.join(found)}.", style="bold red")


def verdicts(runs: "Sequence[Run]") -> "list[tuple[Load, Ranking, str]]":
    """Each load under which methods can be compared, and what that says, in words, too."""
    from peagle.bench.tables import verdict_sentence
    from peagle.bench.verdict import by_load, judge

    loads = by_load(runs)
    found = [(load, judge(same)) for load, same in loads.items()]
    return [
        (load, verdict, (f"{load.words}: " if len(loads) > 1 else "") + verdict_sentence(verdict))
        for load, verdict in found
        if verdict is not None
    ]
