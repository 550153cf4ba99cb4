"""Trackers to which a training run can report: TensorBoard, and Weights & Biases."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.cli.groups import Flags
from peagle.cli.training_log import Entry, Tracker, TrainingLog, log_directory, scalars
from peagle.errors import InputError, lacking

if TYPE_CHECKING:
    from peagle.train.recipe import Recipe

RUN_ID = "wandb-id"
"""File with the run's id at Weights & Biases, so that it can be continued."""


class Tracking(Flags):
    """The trackers that a run reports to."""

    tensorboard: bool = False
    """Also write event files for TensorBoard."""
    wandb: str | None = None
    """Weights & Biases project to log to."""

    def check(self) -> None:
        """Raise `InputError` when a library is missing, before anything is loaded."""
        if self.tensorboard:
            need("tensorboard", "--tensorboard")
        if self.wandb is not None:
            need("wandb", "--wandb", ours=False)

    @contextmanager
    def open(self, recipe: "Recipe", step: int) -> Iterator[TrainingLog]:
        """The log of a run that starts after `step`, which the trackers receive as well."""
        directory, trackers = log_directory(recipe), []
        with ExitStack() as stack:
            if self.tensorboard:
                trackers.append(stack.enter_context(_tensorboard(directory, step)))
            if self.wandb is not None:
                run = _wandb(self.wandb, directory, recipe, step)
                trackers.append(stack.enter_context(run))
            yield TrainingLog(recipe, step, trackers)


def need(module: str, what: str, ours: bool = True) -> None:
    """Raise `InputError` when a library is not installed; `ours` is one of the extra `train`."""
    found = find_spec(module)
    if found is None or found.origin is None:  # a directory ./wandb is not the library
        lack = f"{what} needs {module}"
        raise InputError(lacking(lack, "train") if ours else f"{lack}; pip install {module}")


@contextmanager
def _tensorboard(directory: Path, step: int) -> Iterator[Tracker]:
    """Event files; entries past `step`, from a run that was lost, are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory), purge_step=step + 1, flush_secs=10) as writer:

        def track(entry: Entry) -> None:
            for name, value in scalars(entry).items():
                writer.add_scalar(name, value, entry["step"])

        yield track


@contextmanager
def _wandb(project: str, directory: Path, recipe: "Recipe", step: int) -> Iterator[Tracker]:
    import wandb

    try:
        run = wandb.init(
            project=project,
            name=Path(recipe.output).name,
            dir=directory,
            config=recipe.model_dump(),
            id=_run_id(directory / RUN_ID, fresh=step == 0),
            resume="allow",
        )
    except wandb.Error as error:
        raise InputError(f"--wandb {project}: {error}") from None
    with run:
        yield lambda entry: run.log(scalars(entry), step=entry["step"])


def _run_id(path: Path, fresh: bool) -> str:
    """The id in the file `path`; a new one for a fresh run."""
    if fresh or not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")
