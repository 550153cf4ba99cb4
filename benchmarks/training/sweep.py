"""Several drafters trained at once, each by the package's trainer in a process of its own."""

import ctypes
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import held_out
import torch
from mask_slots import SHARED, MaskSlot, trainer_for
from torch import Tensor

from peagle.bench.environment import machine
from peagle.device import resolve_device, resolve_dtype
from peagle.drafters.checkpoint import EMBEDDINGS, save_drafter
from peagle.models.families import read_spec
from peagle.models.loading import load_decoder
from peagle.models.weights import model_directory
from peagle.train.estimate import Estimate
from peagle.train.initial import initial_drafter
from peagle.train.packing import Document, PackedRows, pack
from peagle.train.prepare import read_rows
from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer, rate

K = 5
"""Drafts per cycle wherever acceptance length is reported, as in the paper's tables."""
WARM, MEASURED = 10, 20
"""Number of steps after which everything is compiled, and after which the pace is known."""
MEETINGS = 2
"""How many times arms wait for one another: before and after their pace is measured."""
PATIENCE = 240
"""Seconds that they wait at most for one another."""


@dataclass(frozen=True)
class Arm:
    """One of the drafters to train."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the recipe, with this arm's values."""
    slot: MaskSlot = SHARED
    longest: int | None = None
    """Number of tokens that training conversations are cut to."""
    inherits: bool = False
    """Whether layers after the first begin as copies of the target's last ones, of equal sizes."""


class Pace:
    """How many steps all arms take: the recipe's, or what the slowest does in a given time."""

    def __init__(self, context: ForkContext, arms: int, seconds: float | None) -> None:
        self._seconds, self._met = seconds, 0
        self._barrier = context.Barrier(arms)
        self._slowest = context.Value(ctypes.c_double, 0.0)

    def wait(self) -> None:
        """Wait until every arm is here."""
        self._met += 1
        self._barrier.wait(PATIENCE)

    def paced(self, recipe: Recipe, seconds_a_step: float) -> Recipe:
        """The recipe with the same number of steps for every arm."""
        with self._slowest.get_lock():
            self._slowest.value = max(self._slowest.value, seconds_a_step)
        self.wait()
        if self._seconds is None:
            return recipe
        steps = max(int(self._seconds / self._slowest.value), MEASURED)
        return recipe.model_copy(update={"steps": steps})

    def leave(self) -> None:
        """Meet the other arms on behalf of one that failed, so that they do not wait in vain."""
        while self._met < MEETINGS:
            self.wait()


@dataclass(frozen=True)
class Sweep:
    """Arms of one recipe on the same conversations, read once."""

    recipe: Recipe
    training: PackedRows
    validation: PackedRows
    seconds: float | None
    keep: bool
    """Whether drafters are saved, each in a directory of its name in the recipe's output."""

    @classmethod
    def read(cls, recipe: Recipe, seconds: float | None = None, keep: bool = False) -> "Sweep":
        """Read the recipe's data."""
        torch.set_num_threads(1)  # threads would be lost to the processes forked from this one
        directory = model_directory(recipe.target)
        spec = read_spec(directory)
        training, validation, _ = read_rows(recipe, directory, spec)
        return cls(recipe, training, validation, seconds, keep)

    def run(self, arms: Sequence[Arm], gpus: int = 1) -> Iterator[dict[str, Any]]:
        """Results in the order in which arms end; for an arm that fails, its name and the error."""
        context = multiprocessing.get_context("fork")
        pace, results = Pace(context, len(arms), self.seconds), context.SimpleQueue()
        processes = [
            context.Process(target=self._report, args=(arm, pace, results, (index, gpus)))
            for index, arm in enumerate(arms)
        ]
        for process in processes:
            process.start()
        for _ in processes:
            yield results.get()
        for process in processes:
            process.terminate()  # an arm that failed may still wait for the others
            process.join()

    def _report(self, arm: Arm, pace: Pace, results: Any, place: tuple[int, int]) -> None:
        index, gpus = place
        if gpus > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(index % gpus)
        try:
            results.put(self._train(arm, pace))
        except Exception as error:  # whatever happened, the other arms continue
            results.put({"arm": arm.name, "error": f"{type(error).__name__}: {error}"})
            pace.leave()

    def _train(self, arm: Arm, pace: Pace) -> dict[str, Any]:
        start = time.perf_counter()
        recipe = Recipe(**{**self.recipe.model_dump(), **arm.changes})
        trainer = self._trainer(arm, recipe)
        losses = _learn(trainer, pace)
        if self.keep:
            _save(Path(recipe.output) / arm.name, trainer)
        result = self._result(arm, trainer, losses)
        return result | {"seconds": round(time.perf_counter() - start, 1)}

    def _trainer(self, arm: Arm, recipe: Recipe) -> Trainer:
        torch.manual_seed(recipe.seed)
        device = resolve_device(recipe.device)
        dtype = resolve_dtype("auto", device)
        target = load_decoder(model_directory(recipe.target), dtype, device)
        rows = self.training if arm.longest is None else shortened(self.training, arm.longest)
        model = initial_drafter(recipe, target, rows)
        if arm.inherits:
            for ours, theirs in zip(reversed(model.rest), reversed(target.layers), strict=False):
                ours.load_state_dict(theirs.state_dict())
        kind = trainer_for(arm.slot, model, recipe.num_speculative_tokens)
        return kind(recipe, target, model, rows, self.validation)

    def _result(self, arm: Arm, trainer: Trainer, losses: list[Tensor]) -> dict[str, Any]:
        agreement = list(trainer.agreement())
        counts = held_out.count(agreement, K)
        accuracy = Estimate.of((agrees, drawn) for _, agrees, drawn in agreement).accuracy
        recent = losses[-len(losses) // 10 :]
        return machine() | {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "arm": arm.name,
            "changes": dict(arm.changes),
            "inherits": arm.inherits,
            "conversations": sum(map(len, self.training.documents)),
            "steps": len(losses),
            "tokens": len(losses) * self.recipe.rows_per_step * self.recipe.row_length,
            "parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            "loss": round(float(torch.stack(recent).mean()), 4),
            "accuracy": [round(share, 4) for share in accuracy],
            "acceptance_length": round(held_out.acceptance_length(counts), 4),
            "interval": [round(bound, 4) for bound in held_out.interval(counts)],
            "held_out": counts,
        }


def shortened(rows: PackedRows, longest: int) -> PackedRows:
    """The first tokens of the same conversations, in rows of the same length."""
    documents = (document for row in rows.documents for document in row)
    cut = (
        Document(
            document.tokens[:longest],
            tuple((a, min(b, longest)) for a, b in document.responses if a < longest - 1),
        )
        for document in documents
    )
    return pack([document for document in cut if document.responses], rows.length)


def _learn(trainer: Trainer, pace: Pace) -> list[Tensor]:
    """Train to the last step; returns the loss of each step."""
    recipe, losses, begun = trainer.recipe, [], 0.0
    for step in itertools.count():
        if step == WARM:
            pace.wait()
            begun = _clock(trainer)
        if step == MEASURED:
            each = (_clock(trainer) - begun) / (MEASURED - WARM)
            recipe = pace.paced(recipe, each)
            print(f"{1e3 * each:.0f} ms a step, {recipe.steps} steps", flush=True)
        if step == recipe.steps:
            break
        losses.append(trainer.gradient(step).sum())
        speed = recipe.learning_rate * rate(recipe, step)
        trainer.optimizer.step(speed, recipe.gradient_clip)
    return losses


def _clock(trainer: Trainer) -> float:
    """The time, once the device has finished its work."""
    if trainer.target.embed.weight.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _save(directory: Path, trainer: Trainer) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    shared = frozenset({EMBEDDINGS} if trainer.recipe.shares_embeddings else ())
    save_drafter(directory, trainer.model, shared=shared)
