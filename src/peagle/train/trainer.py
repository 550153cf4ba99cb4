"""The training loop: float32 weights, bfloat16 compute on a GPU."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafters.checkpoint import EMBEDDINGS, HEAD, save_drafter
from peagle.drafters.dflash import BlockModel
from peagle.drafters.dflash_checkpoint import save_dflash
from peagle.drafters.kind import DFLASH, PEAGLE
from peagle.drafters.model import DraftModel
from peagle.drafters.mtp import MTPHead, save_mtp
from peagle.drafters.network import Network
from peagle.errors import InputError
from peagle.files import output_lock, writing
from peagle.models.decoder import Decoder
from peagle.models.ends import Ends
from peagle.models.weights import model_directory
from peagle.ops.weight import dense
from peagle.train.blocks import BlockPass
from peagle.train.cod import Chains, Elements
from peagle.train.estimate import Estimate
from peagle.train.features import Features, FeatureSource, padded_for
from peagle.train.loss import Comparison, pace
from peagle.train.optimizer import DraftOptimizer
from peagle.train.packing import Batch, PackedRows
from peagle.train.parallel import ALONE, Ranks
from peagle.train.partition import ParallelPass, PartitionedPass, Pass, PassLoss
from peagle.train.recipe import Recipe
from peagle.train.schedule import Schedule
from peagle.train.segment import elements_per_segment
from peagle.train.snapshot import Progress, is_finished, load_snapshot, save_snapshot, snapshot_path
from peagle.train.unroll import SequentialPass
from peagle.transfer import to_device

REPORT_EVERY = 10
"""Steps between reports of the loss."""
MAKE_ROOM = "make room, and the same command resumes from the last snapshot, if there is one"


@dataclass(frozen=True)
class Telemetry:
    """What the loop reports to `watch`."""

    step: int
    loss: float
    """Mean over the elements in the loss, since the last report."""
    estimate: Estimate | None
    """Set after an evaluation."""
    best: bool
    """Whether this estimate is the best so far, so that its drafter is now in `output`."""


Watch = Callable[[Telemetry], None]


class Trainer:
    """Trains one drafter by a recipe; `run` resumes from the output's snapshot."""

    def __init__(
        self,
        recipe: Recipe,
        target: Ends,
        model: Network,
        training: PackedRows,
        validation: PackedRows,
        source: FeatureSource,
        ranks: Ranks = ALONE,
        origin: Mapping[str, str] = {},
    ) -> None:
        """origin: what the run depends on, keyed by the words an error uses for a mismatch."""
        self.recipe, self.target, self.model = recipe, target, model
        self._origin = origin
        self._training, self.validation = training, validation
        self._schedule = Schedule(recipe, training)
        self._source = source
        self._device = target.embed.weight.device
        self._segment = elements_per_segment(recipe, model.config, self._device)
        self._compare = Comparison(model, target, recipe.loss)
        self.optimizer, self._ranks = DraftOptimizer(model, recipe), ranks
        self._output = Path(recipe.output)
        self._snapshot = snapshot_path(self._output)
        self._progress = Progress()
        self._stopping = False
        self._asked: Callable[[], bool] = lambda: False

    def run(self, watch: Watch) -> Progress:
        """Train to the last step, or until `stop`.

        Raises `InputError` when the loss is NaN or infinite, naming the documents, when ranks do
        not begin with the same data, recipe and snapshot, and while another run has the output.
        """
        with output_lock(self._output, self._ranks.first):
            return self._run(watch)

    def _run(self, watch: Watch) -> Progress:
        self._begin()
        losses: list[Tensor] = []
        for step in range(self._progress.step, self.recipe.steps):
            losses.append(self.gradient(step))
            speed = self.recipe.learning_rate * rate(self.recipe, step)
            self.optimizer.step(speed, self.recipe.gradient_clip)
            self._progress.step = step + 1
            last = step + 1 == self.recipe.steps
            if last or (step + 1) % self.recipe.evaluate_every == 0:
                self._evaluate(watch, losses)
            elif (step + 1) % self.recipe.evaluate_every % REPORT_EVERY == 0:
                watch(Telemetry(step + 1, self._mean(losses), None, False))
            if not last and self._told_to_stop():
                self._leave(watch, losses)
                return self._progress
        if self._ranks.first:
            self._snapshot.unlink(missing_ok=True)
        return self._progress

    def stop(self) -> None:
        """End `run` with a snapshot after the current step, with several ranks after the next one.

        For signal handlers.
        """
        self._stopping = True

    def _begin(self) -> None:
        """Resume from the snapshot. If there is none, write one, so that a drafter without a
        snapshot is a finished one, and too small a disk is noticed before the first step."""
        begun = self._snapshot.exists()
        if begun:
            self._progress = load_snapshot(self._snapshot, self.optimizer, self._origin)
            if not (self._output / "config.json").exists():  # somebody has removed the best so far
                self._progress.best_step, self._progress.best_acceptance_length = 0, 0.0
        self._ranks.agree({"another snapshot": f"{begun} {self._progress}", **self._origin})
        if is_finished(self._output):
            raise InputError(f"another run has finished output {self._output} meanwhile")
        if not begun:
            self._keep()

    def _told_to_stop(self) -> bool:
        """Whether any rank was told to stop one step ago: waiting for the current answer would idle
        the devices."""
        if self._ranks.size == 1:
            return self._stopping
        told, self._asked = self._asked, self._ranks.ask(self._stopping, self._device)
        return told()

    def gradient(self, step: int) -> Tensor:
        """Add up a step's gradient over passes and ranks; returns each pass's share of the loss."""
        passes, chains = self._schedule.passes(step), self._schedule.chains(step)
        weight = max(sum(drawn.loss_weight(self.recipe.decay) for drawn in chains), 1.0)
        losses = torch.zeros(len(passes), device=self._device)
        alone = self.recipe.train == "selector"
        for index in self._ranks.own(len(passes)):
            batch = self._batch(self._training, passes[index])
            features = self._source("training", passes[index], batch)
            run = self._pass(batch, features, chains[index].padded(len(batch)))
            loss_of = self._pass_loss(batch, features, weight)
            losses[index] = self._readout_alone(run, loss_of) if alone else run.backward(loss_of)
        sharded = self.recipe.shard_target and self.recipe.features == "online"
        if sharded and self._ranks.idle(len(passes)):
            # a sharded target runs on all ranks or on none
            self._source("training", passes[0], self._batch(self._training, passes[0]))
        self._ranks.add_up([*self.optimizer.gradients(), losses])
        return losses

    def _pass(
        self, batch: Batch, features: Features, chains: Chains
    ) -> PartitionedPass[Any] | SequentialPass:
        recipe, model = self.recipe, self.model
        if isinstance(model, BlockModel):
            return BlockPass(model, batch, features, chains, self._segment)
        if isinstance(model, DraftModel) and model.config.kind is PEAGLE:
            limits = self._segment, recipe.activation_checkpointing
            return ParallelPass(model, batch, features, chains, *limits)
        return SequentialPass(model, batch, features, recipe.num_speculative_tokens)

    def _readout_alone(
        self, run: PartitionedPass[Any] | SequentialPass, loss_of: PassLoss
    ) -> Tensor:
        """As `backward` of a pass whose layers are not trained."""
        total = torch.zeros((), device=self._device)
        with torch.no_grad():
            for part in run.passes():
                with torch.enable_grad():
                    loss = loss_of(part)
                    loss.backward()
                total += loss.detach()
        return total

    def _pass_loss(self, batch: Batch, features: Features, weight: float) -> PassLoss:
        """The loss of passes over a batch, as a share of the step's mean."""
        recipe, compare = self.recipe, self._compare

        def loss_of(part: Pass) -> Tensor:
            (depths,) = to_device(self._device, part.elements.depths)
            weights = recipe.decay ** depths.float() / weight
            asked = part.hidden, features.final, part.elements.places
            if recipe.dpace is not None:
                weights = weights * pace(compare.confidence(*asked), part.elements, recipe.dpace)
            losses = []
            if recipe.train == "all":
                losses.append(compare.loss(*asked, weights))
            if self.model.readout.selector is not None:
                previous = self._previous(batch, part.elements)
                losses.append(compare.selector_loss(*asked, weights, previous))
            return torch.stack(losses).sum()

        return loss_of

    def _previous(self, batch: Batch, elements: Elements) -> Tensor:
        """[elements] the token before the one that each predicts; -1 where it was read."""
        first = {PEAGLE: 1, DFLASH: 0}.get(self.model.config.kind, len(batch))
        unread = elements.depths >= first
        tokens = torch.where(unread, batch.tokens[elements.places], -1)
        return to_device(self._device, tokens)[0]

    def _evaluate(self, watch: Watch, losses: list[Tensor]) -> None:
        mean, estimate = self._mean(losses), self.estimate()
        best = estimate.acceptance_length > self._progress.best_acceptance_length
        if best:
            self._progress.best_step = self._progress.step
            self._progress.best_acceptance_length = estimate.acceptance_length
            if self._ranks.first:
                with writing(self._output, MAKE_ROOM):
                    self._save()
        self._keep()
        watch(Telemetry(self._progress.step, mean, estimate, best))

    def _save(self) -> None:
        if isinstance(self.model, BlockModel):
            save_dflash(self._output, self.model, shared=self._shared)
        elif isinstance(self.model, MTPHead):
            origin = self.recipe.initial_drafter or self.recipe.target
            save_mtp(self._output, self.model, model_directory(origin))
        elif isinstance(self.model, DraftModel):
            save_drafter(self._output, self.model, shared=self._shared)

    def _leave(self, watch: Watch, losses: list[Tensor]) -> None:
        """Write a snapshot, and report the losses since the last report, which it does not hold."""
        mean = self._mean(losses) if losses else None  # refuses what must not be kept
        self._keep()
        if mean is not None:
            watch(Telemetry(self._progress.step, mean, None, False))

    def _keep(self) -> None:
        """Write the snapshot that a later run resumes from."""
        if self._ranks.first:
            with writing(self._snapshot, MAKE_ROOM):
                save_snapshot(self._snapshot, self.optimizer, self._progress, self._origin)
        self._ranks.wait()

    @cached_property
    def _shared(self) -> frozenset[str]:
        """What is the target's, and so is left out of the drafter's file.

        Nothing of a target that only others serve, since they may scale their embeddings.
        """
        model, target = self.model, self.target
        pairs: dict[str, tuple[Tensor, Tensor]]
        pairs = {EMBEDDINGS: (model.embed.weight, target.embed.weight)}
        if model.config.kind is DFLASH:
            pairs[HEAD] = dense(model.readout.head.weight), dense(target.head.weight)
        frozen = (name for name, (own, _) in pairs.items() if not own.requires_grad)
        served = isinstance(target, Decoder)
        return frozenset(name for name in frozen if served and torch.equal(*pairs[name]))

    def estimate(self) -> Estimate:
        """Accuracy and acceptance length on the held-out documents."""
        return Estimate.of(self._agreement())

    @torch.no_grad()
    def _agreement(self) -> Iterator[tuple[Tensor, Tensor]]:
        """How drafter and target agree on all whole chains of each held-out batch.

        Two tables [length, depths] by anchor and depth, below 0 where there is nothing to predict:
        1 they agree, 0 they do not; the probability that both draw the same at temperature 1.
        """
        depths = self.recipe.num_speculative_tokens
        for rows in torch.arange(len(self.validation)).split(self.recipe.rows_per_pass):
            batch = self._batch(self.validation, rows)
            features = self._source("validation", rows, batch)
            run = self._pass(batch, features, Chains.whole(batch, depths))
            agrees = torch.full((len(batch), depths), -1, dtype=torch.int8)
            drawn = torch.full((len(batch), depths), -1.0)
            for part in run.passes():
                elements, previous = part.elements, self._previous(batch, part.elements)
                asked = part.hidden, features.final, elements.places, previous
                right, chances = self._compare.judge(*asked)
                index = elements.anchors, elements.depths
                agrees[index] = right.to("cpu", torch.int8)
                drawn[index] = chances.to("cpu", torch.float32)
            yield agrees, drawn

    def _batch(self, rows: PackedRows, index: Tensor) -> Batch:
        return padded_for(self._device, rows.batch(index))

    def _mean(self, losses: list[Tensor]) -> float:
        """Mean of the collected losses, read from the device at once; empties the list."""
        table = torch.stack(losses).cpu()
        losses.clear()
        wrong = (~table.isfinite()).nonzero()
        if len(wrong):
            step, index = wrong[0].tolist()
            self._refuse(self._progress.step - len(table) + step, index, table[step, index].item())
        return float(table.sum(1).mean())

    def _refuse(self, step: int, index: int, loss: float) -> None:
        """Raise `InputError` naming a pass's documents, or the one whose states are not finite."""
        documents = self._training.documents_of(self._schedule.passes(step)[index])
        unreadable = self._source.unreadable(documents)
        if unreadable is not None:
            raise InputError(
                f"the loss became {loss} at step {step + 1}: the target's hidden states of "
                f"{unreadable.source or 'a document'} are not finite; leave it out"
            )
        names = ", ".join(document.source or "?" for document in documents[:5])
        raise InputError(
            f"the loss became {loss} at step {step + 1}, on {len(documents)} documents ({names} "
            "...); lower learning_rate or raise warmup_steps"
        )


def rate(recipe: Recipe, step: int) -> float:
    """Learning rate as a share of its peak: linear warm-up, then linear to zero."""
    warm = (step + 1) / max(recipe.warmup, 1)
    left = (recipe.steps - step) / (recipe.steps - recipe.warmup)
    return min(warm, left, 1.0)
