"""`peagle train`: from a target and text it generated to a drafter."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EXAMPLE = "Example: peagle train recipe.yaml learning_rate=3e-4 steps=2000"


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML recipe: target, data, output, method ...")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, each in place of the recipe's")
    ] = None,
) -> None:
    """Train a drafter; the best one so far is always in the recipe's output directory."""
    from peagle.train.recipe import Recipe
    from peagle.train.run import prepare
    from peagle.train.trainer import Report

    console = Console(stderr=True)
    plan = Recipe.load(recipe, overrides or [])
    trainer = prepare(plan)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("loss -", total=plan.steps)

        def watch(report: Report) -> None:
            bar.update(task, completed=report.step, description=f"loss {report.loss:.4f}")
            if report.estimate is not None:
                rates = " ".join(f"{share:.3f}" for share in report.estimate.accuracy)
                mark = "  best" if report.best else ""
                length = report.estimate.acceptance_length
                bar.console.print(
                    f"step {report.step}  loss {report.loss:.4f}  AL {length:.3f}"
                    f"  accuracy per depth {rates}{mark}"
                )

        progress = trainer.run(watch)
    console.print(
        f"{plan.output}: best estimated AL {progress.best_acceptance_length:.3f} "
        f"at step {progress.best_step}"
    )
