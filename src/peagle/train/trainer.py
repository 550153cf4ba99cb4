"""The training loop: one device, fp32 weights, bfloat16 compute on a GPU."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from peagle.drafters.checkpoint import EMBEDDINGS, save_drafter
from peagle.drafters.model import DraftModel
from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.train.cod import Elements, depth_shares
from peagle.train.conversations import PackedRows
from peagle.train.estimate import Agreement, Estimate
from peagle.train.features import Features, target_features
from peagle.train.loss import LOSSES, Charged, Comparison
from peagle.train.optimizer import DraftOptimizer
from peagle.train.recipe import Recipe
from peagle.train.snapshot import Progress, load_snapshot, save_snapshot
from peagle.train.unroll import Pass, parallel_pass, sequential_passes

SNAPSHOT = "snapshot.safetensors"


@dataclass(frozen=True)
class Report:
    """What the loop tells whoever watches."""

    step: int
    loss: float
    """Per charged element, since the last report."""
    estimate: Estimate | None
    """Set after an evaluation."""
    best: bool
    """Whether this estimate is the best so far, and its drafter the one now in `output`."""


Watch = Callable[[Report], None]


class Trainer:
    """Trains one drafter by a recipe; `run` continues wherever the output's snapshot ends."""

    def __init__(
        self,
        recipe: Recipe,
        target: Decoder,
        model: DraftModel,
        training: PackedRows,
        validation: PackedRows,
    ) -> None:
        self.recipe, self.target, self.model = recipe, target, model
        self._training, self._validation = training, validation
        self._device = target.embed.weight.device
        self._compare = Comparison(model, target, LOSSES[recipe.loss])
        fused = self._device.type == "cuda"
        self._optimizer = DraftOptimizer(model, recipe, fused)
        self._output = Path(recipe.output)
        self._snapshot = self._output.with_name(self._output.name + "." + SNAPSHOT)
        self._progress = Progress()

    def run(self, watch: Watch) -> Progress:
        """Train to the last step. Raises `InputError` when the loss is no longer a number."""
        if self._snapshot.exists():
            name = self.recipe.model_dump_json()
            self._progress = load_snapshot(self._snapshot, self.model, self._optimizer, name)
        losses: list[Tensor] = []
        for step in range(self._progress.step, self.recipe.steps):
            losses.append(self._step(step))
            self._progress.step = step + 1
            last = step + 1 == self.recipe.steps
            if last or (step + 1) % self.recipe.evaluate_every == 0:
                self._evaluate(watch, losses)
            elif len(losses) == 10:
                watch(Report(step + 1, self._mean(losses), None, False))
        self._snapshot.unlink(missing_ok=True)
        return self._progress

    def _step(self, step: int) -> Tensor:
        """One optimizer step; the loss stays on the device."""
        shares = self._shares()
        loss = self._loss(self._rows(step), shares, self._generator(step), None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.gradient_clip)
        self._optimizer.step(self.recipe.learning_rate * rate(self.recipe, step))
        return loss.detach()

    def _loss(
        self,
        rows: PackedRows,
        shares: list[float],
        generator: torch.Generator,
        agreement: Agreement | None,
    ) -> Tensor:
        """Mean weighted loss over the charged elements of a batch."""
        total = torch.zeros((), device=self._device)
        weight = torch.zeros((), device=self._device)
        with torch.autocast(self._device.type, torch.bfloat16, self._device.type == "cuda"):
            features = target_features(self.target, rows, self.model.config.taps)
            for share in self._passes(rows, features, shares, generator):
                charged, weights = self._charge(share, features)
                total, weight = total + charged.total, weight + weights.sum()
                if agreement is not None:
                    agreement.add(share.elements, charged.agrees)
        return total / weight.clamp(min=1.0)

    def _passes(
        self, rows: PackedRows, features: Features, shares: list[float], generator: torch.Generator
    ) -> Iterator[Pass]:
        if self.model.config.parallel:
            return parallel_pass(self.model, rows, features, shares, generator)
        return sequential_passes(self.model, rows, features, self.recipe.num_speculative_tokens)

    def _charge(self, share: Pass, features: Features) -> tuple[Charged, Tensor]:
        """Compare the charged elements with the target's prediction of the same token.

        The element of (anchor, depth) has read tokens up to anchor + depth + 1 (DESIGN section 4),
        so it is there that the target predicts the token it is asked for.
        """
        elements: Elements = share.elements
        row, column = elements.charged.nonzero(as_tuple=True)
        depth = elements.depths[row, column]
        final = features.final[row, elements.anchors[row, column] + depth + 1]
        weights = self.recipe.depth_decay ** depth.float()
        return self._compare(share.hidden[row, column], final, weights), weights

    def _evaluate(self, watch: Watch, losses: list[Tensor]) -> None:
        estimate = self.estimate()
        best = estimate.acceptance_length > self._progress.best_acceptance_length
        if best:
            self._progress.best_step = self._progress.step
            self._progress.best_acceptance_length = estimate.acceptance_length
            shared = frozenset({EMBEDDINGS} if self.recipe.shares_embeddings else ())
            save_drafter(self._output, self.model, shared=shared)
        name = self.recipe.model_dump_json()
        save_snapshot(self._snapshot, self.model, self._optimizer, self._progress, name)
        watch(Report(self._progress.step, self._mean(losses), estimate, best))

    @torch.no_grad()
    def estimate(self) -> Estimate:
        """Accuracy and acceptance length on the held-out documents, whole chains everywhere."""
        agreement = Agreement(self.recipe.num_speculative_tokens)
        whole = [1.0] * self.recipe.num_speculative_tokens
        order = torch.arange(len(self._validation))
        for index in order.split(self.recipe.rows_per_step):
            rows = self._validation.select(index, self._device)
            agreement.begin(rows.tokens)
            self._loss(rows, whole, self._generator(0), agreement)
        return agreement.estimate()

    def _rows(self, step: int) -> PackedRows:
        """The step's batch: every epoch goes through all rows in an order of its own."""
        count, wanted = len(self._training), self.recipe.rows_per_step
        index = [self._row_at(place, count) for place in range(step * wanted, (step + 1) * wanted)]
        return self._training.select(torch.tensor(index), self._device)

    def _row_at(self, place: int, count: int) -> int:
        epoch, offset = divmod(place, count)
        generator = torch.Generator().manual_seed(self.recipe.seed + epoch)
        return int(torch.randperm(count, generator=generator)[offset])

    def _generator(self, step: int) -> torch.Generator:
        seed = (self.recipe.seed << 32) + step
        return torch.Generator(self._device).manual_seed(seed)

    def _shares(self) -> list[float]:
        recipe = self.recipe
        return depth_shares(recipe.num_speculative_tokens, recipe.cod_ratio, recipe.cod_floor)

    def _mean(self, losses: list[Tensor]) -> float:
        """Mean of the collected losses, which it empties; one read from the device for all."""
        mean = float(torch.stack(losses).mean())
        losses.clear()
        if not math.isfinite(mean):
            raise InputError(
                f"the loss became {mean} before step {self._progress.step}; "
                "lower learning_rate or raise warmup_steps"
            )
        return mean


def rate(recipe: Recipe, step: int) -> float:
    """Learning rate as a share of its peak: linear warm-up, then linear to zero (paper.md 2.1)."""
    warm = (step + 1) / max(recipe.warmup_steps, 1)
    left = (recipe.steps - step) / max(recipe.steps - recipe.warmup_steps, 1)
    return min(warm, left, 1.0)
