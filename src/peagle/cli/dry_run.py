"""The dry run of `peagle train`: what a run would do and need, as tables."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle.cli.tables import print_table
from peagle.drafters.diagnosis import foreign_facts
from peagle.train.packing import PackedRows
from peagle.train.plan import Forecast
from peagle.train.prepare import FINISHED
from peagle.train.recipe import Recipe
from peagle.train.snapshot import is_finished

SIZES = ((2**30, "GiB"), (2**20, "MiB"))
TIMES = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
Row = tuple[str, ...]
Units = tuple[tuple[float, str], ...]


def print_plan(recipe: Recipe) -> None:
    """Print what a recipe amounts to; nothing is written. Raises `InputError` as `Plan.of`."""
    plan, console = Forecast.of(recipe), Console()
    _print(console, "Recipe", _recipe(plan))
    _print(console, "Target", _target(plan))
    _print(console, "Data", _data(plan))
    _print(console, "Elements of a step", _elements(plan), "depth", "share", "elements")
    _print(console, "Parameters", _parameters(plan), "", "trained", "frozen")
    _print(console, f"Memory on {plan.device}", _memory(plan), "", "about")
    _print(console, f"Time on one {plan.device}", _time(plan), "", "about")
    if is_finished(Path(recipe.output)):
        console.print(
            f"A run would be refused: {recipe.output} {FINISHED}.", markup=False, soft_wrap=True
        )


def _print(console: Console, title: str, rows: Iterable[Row], *columns: str) -> None:
    """A titled table; all columns with a heading but the first hold numbers."""
    table = Table(box=None, padding=(0, 2), pad_edge=False, show_header=bool(columns))
    for index, column in enumerate(columns or ("", "")):
        table.add_column(column, justify="right" if columns and index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(f"[bold]{title}[/]")
    print_table(console, table)
    console.print()


def _recipe(plan: Forecast) -> Iterable[Row]:
    given = plan.recipe.model_fields_set
    for key, value in plan.resolved().items():
        yield key, _text(value) + ("" if key in given else "  [dim](default)[/]")


def _target(plan: Forecast) -> Iterable[Row]:
    """What computes the features; of a target that peagle does not run, who does."""
    yield "features by", plan.teacher.computed_by(plan.dtype)
    for told in foreign_facts(plan.teacher.directory).values():
        yield "served", told


def _text(value: Any) -> str:
    """A value as YAML writes it."""
    if isinstance(value, tuple):
        return escape(f"[{', '.join(map(str, value))}]")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return escape(str(value))


def _data(plan: Forecast) -> Iterable[Row]:
    recipe = plan.recipe
    epochs = recipe.steps * recipe.rows_per_step / len(plan.training)
    yield "read", str(plan.summary)
    yield "to train on", _packed(plan.training)
    yield "held out", _packed(plan.validation)
    if plan.draftable is not None:
        share = f"{plan.draftable:.1%} of the held-out responses' tokens"
        yield "drafted", f"{plan.config.draft_vocab_size:,} ids, {share}"
    yield "the run", f"{recipe.steps:,} steps of {recipe.rows_per_step} rows, {epochs:.1f} epochs"
    if plan.disk:
        yield "features", f"{_in_unit(plan.disk, plan.disk, SIZES)} on disk"


def _packed(rows: PackedRows) -> str:
    documents = [document for row in rows.documents for document in row]
    share = sum(len(document.tokens) for document in documents) / rows.tokens.numel()
    shape = f"{len(rows):,} rows of {rows.length:,}"
    return f"{len(documents):,} documents in {shape}, {share:.1%} full"


def _elements(plan: Forecast) -> Iterable[Row]:
    depths = zip(plan.schedule.shares, plan.step.loss_elements, strict=True)
    for depth, (share, count) in enumerate(depths):
        yield str(depth), f"{share:.3f}", f"{count:,}"
    yield "in the loss", "", f"{sum(plan.step.loss_elements):,}"
    yield "through the layers", "", f"{plan.through:,}"


def _parameters(plan: Forecast) -> Iterable[Row]:
    parts = plan.parameters()
    for part, numbers in parts.items():
        yield part, f"{numbers.trained:,}", f"{numbers.frozen:,}"
    trained = sum(numbers.trained for numbers in parts.values())
    yield "in all", f"{trained:,}", f"{sum(numbers.frozen for numbers in parts.values()):,}"


def _memory(plan: Forecast) -> Iterable[Row]:
    parts = plan.memory()
    whole = sum(parts.values())
    for part, size in parts.items():
        yield part, _in_unit(size, whole, SIZES)
    yield "in all", _in_unit(whole, whole, SIZES)
    if plan.capacity is not None:
        yield "the device has", _in_unit(plan.capacity, whole, SIZES)


def _time(plan: Forecast) -> Iterable[Row]:
    rate, parts = plan.measure_rate(), plan.operations()
    step = plan.seconds(sum(parts.values()), rate)
    for part, operations in parts.items():
        yield part, _in_unit(plan.seconds(operations, rate), step, TIMES)
    yield "a step", _in_unit(step, step, TIMES)
    evaluation = plan.seconds(plan.evaluation_operations(), rate)
    yield "an evaluation", _in_unit(evaluation, evaluation, TIMES)
    caching = plan.seconds(plan.caching_operations(), rate)
    if caching:
        yield "features, once", _in_unit(caching, caching, TIMES)
    whole = caching + plan.recipe.steps * step + plan.evaluations * evaluation
    yield "in all", _in_unit(whole, whole, TIMES)
    yield "rate of a bare product", f"{rate / 1e12:,.2f} TFLOP/s"


def _in_unit(amount: float, scale: float, units: Units) -> str:
    """An amount in the largest unit that `scale` reaches."""
    size, unit = next((unit for unit in units if scale >= unit[0]), units[-1])
    return f"{amount / size:,.2f} {unit}"
