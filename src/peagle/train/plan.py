"""What a run would take, counted before it begins: parameters, elements, memory, operations.

Only the target's configuration is read; both models are built without values. All counts are for
one device.
"""

import copy
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.device import resolve_device, resolve_dtype
from peagle.drafters.kind import DFLASH, MTP
from peagle.drafters.network import Network
from peagle.models import foreign
from peagle.models.decoder import Decoder
from peagle.models.loading import Stored, stored_bytes
from peagle.ops.linear import Linear
from peagle.ops.moe import RoutedExperts
from peagle.ops.weight import dense
from peagle.train.cod import Chains
from peagle.train.feature_cache import cache_bytes
from peagle.train.initial import choose_trained, kept_tokens, new_head
from peagle.train.loss import chunk_rows
from peagle.train.optimizer import DraftOptimizer
from peagle.train.packing import PackedRows
from peagle.train.prepare import Preflight, check_output
from peagle.train.recipe import Recipe
from peagle.train.schedule import Schedule
from peagle.train.segment import elements_per_segment, kept_by_layer
from peagle.train.work import Work

PARTS = {
    "fc": ("embedding_norm", "fc", "feature_norm", "tap_norms", "mask_hidden", "hidden_norm"),
    "embeddings": ("embed",),
    "layers": ("first", "layer", "rest"),
    "head": ("target_norm", "readout.norm", "readout.head"),
    "selector": ("readout.selector",),
}
"""How the names of each part's parameters begin."""
FLOAT32 = 4
SCORES = 2
"""Matrices of queries x keys that attention keeps without FlexAttention: scores and weights."""
LOGITS = {True: 2, False: 9}
"""Matrices of elements x vocabulary that exist at once, with compiled layers and without."""
ATTAINED = {True: 0.6, False: 0.25}
"""Share of a bare matrix product's rate that a step reaches, with compiled layers (Qwen3-8B's sizes
on an H200) and without (the bundled pair's on two cores)."""


@dataclass(frozen=True)
class Parameters:
    """Counts of trained and of frozen parameters."""

    trained: int
    frozen: int


@dataclass(frozen=True)
class Forecast(Preflight):
    """A run that has not begun, and what it would take."""

    device: torch.device
    multiplied: int
    """Parameters of the target's layers that an element is multiplied by."""
    stored: Stored
    """The target's memory, as its files hold it."""
    model: Network
    """Without values."""

    @classmethod
    def of(cls, recipe: Recipe, *, dry_run: bool = True) -> Self:
        """Read the data and the configuration.

        Raises `InputError` as the run itself would, but not for an output that is finished.
        """
        check_output(Path(recipe.output), dry_run=dry_run)
        device = resolve_device(recipe.device)
        dtype, ready = resolve_dtype("auto", device), Preflight.of(recipe, dry_run=dry_run)
        with torch.device("meta"):
            model = new_head(ready.config, 1, ready.teacher.spec).to(dtype)
        choose_trained(recipe, model)
        teacher = ready.teacher
        if teacher.own:
            with torch.device("meta"):
                multiplied = in_products(Decoder(teacher.spec, 1).layers)
            stored = stored_bytes(teacher.directory, dtype, widened=device.type == "cpu")
        else:
            multiplied = foreign.multiplied(teacher.directory)
            stored = foreign.foreign_bytes(teacher.directory, dtype)
        return cls(**vars(ready), device=device, multiplied=multiplied, stored=stored, model=model)

    @property
    def draftable(self) -> float | None:
        """The share of the held-out responses' tokens that can be drafted; None where all can, and
        where an initial drafter has decided."""
        if not self.config.reduced_vocabulary or self.recipe.initial_drafter is not None:
            return None
        tokens = self.validation.tokens[self.validation.loss_mask]
        return float(torch.isin(tokens, kept_tokens(self.config, self.training)).float().mean())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layers compute in."""
        return dense(self.model.fc.weight).dtype

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled and attention skips what is masked."""
        return self.device.type == "cuda"

    @property
    def capacity(self) -> int | None:
        """Bytes of the GPU's memory; None on a CPU."""
        if self.device.type == "cpu":
            return None
        return torch.cuda.get_device_properties(self.device).total_memory

    def resolved(self) -> dict[str, Any]:
        """Every key of the recipe with the value that the run uses."""
        attentions = self.config.transformer.attention.values()
        return self.recipe.model_dump() | {
            "intermediate_size": self.config.layer.feed_forward.intermediate_size,
            "qk_norm": self.config.attention.qk_norm,
            "draft_vocab_size": self.config.draft_vocab_size,
            "sliding_window": max(each.window or 0 for each in attentions) or None,
            "num_hidden_layers": len(self.config.transformer.layers),
            "norm_before_residual": getattr(self.config, "norm_before_residual", False),
            "selector_rank": self.config.selector and self.config.selector.rank,
            "warmup_steps": self.recipe.warmup,
            "elements_per_segment": self._segment,
            "taps": self.config.taps,
            "train_embeddings": not self.recipe.shares_embeddings,
            "train_head": self.recipe.trains_head,
            "depth_decay": self.recipe.decay,
            "device": str(self.device),
        }

    def parameters(self) -> dict[str, Parameters]:
        """The drafter's parameters, by part."""
        trained, frozen = Counter[str](), Counter[str]()
        for name, parameter in self.model.named_parameters():
            counts = trained if parameter.requires_grad else frozen
            counts[part_of(name)] += parameter.numel()
        return {part: Parameters(trained[part], frozen[part]) for part in PARTS}

    @property
    def schedule(self) -> Schedule:
        """Which rows and chains each step takes."""
        return Schedule(self.recipe, self.training)

    @cached_property
    def step(self) -> Work:
        """An average step's work: that of the first, on the rows and elements that it will draw."""
        passes, chains = self.schedule.passes(0), self.schedule.chains(0)
        return self._work(self.training, passes, chains)

    @cached_property
    def evaluation(self) -> Work:
        """An evaluation's work: whole chains on every held-out row."""
        passes = torch.arange(len(self.validation)).split(self.recipe.rows_per_pass)
        depths = self.recipe.num_speculative_tokens
        chains = [Chains.whole(self.validation.batch(rows), depths) for rows in passes]
        return self._work(self.validation, passes, chains)

    def _work(self, data: PackedRows, passes: Sequence[Tensor], chains: Sequence[Chains]) -> Work:
        pairs = [(data.batch(rows), drawn) for rows, drawn in zip(passes, chains, strict=True)]
        return Work.of(self.recipe, pairs, self._segment)

    @property
    def _segment(self) -> int:
        return elements_per_segment(self.recipe, self.config, self.device)

    @property
    def _one_pass(self) -> bool:
        """Whether rows deeper than depth 0 share its keys and values, and their gradients."""
        return self.config.kind.parallel_drafting

    @property
    def through(self) -> int:
        """Rows of an average step that go through the draft layers; of a DFlash head's context they
        only make keys and values."""
        return self.step.deeper + self.step.tokens * (self.config.kind is not DFLASH)

    @property
    def _in_context(self) -> int:
        """Parameters of the draft layers that a token at depth 0 is multiplied by."""
        if self.config.kind is DFLASH:
            return in_products(*(layer.attention.qkv for layer in self.model.blocks))
        return in_products(*self.model.blocks)

    @property
    def disk(self) -> int:
        """Bytes of the features kept on disk."""
        rows = len(self.training) + len(self.validation)
        return cache_bytes(self.recipe, self.config, rows) if self._cached else 0

    @property
    def _cached(self) -> bool:
        return self.recipe.features == "cached"

    def memory(self) -> dict[str, int]:
        """Peak bytes of a step, by what they are for."""
        target = self.stored.ends + self.stored.layers * (not self._cached)
        if self.config.reduced_vocabulary:
            target += self.model.readout.head.weight.nbytes  # the same rows of the target's head
        tokens, deeper = self.step.largest_pass, self.step.largest_segment
        features = tokens * (self.config.feature_size + self.config.target_hidden_size)
        return {
            "weights": sum(each.nbytes for each in self._own),
            **self._state(),
            "target": target,
            "features": features * self.dtype.itemsize,
            "activations at depth 0": self._context_activations(tokens),
            "activations deeper": self._activations(deeper, tokens + deeper * self._one_pass),
            "logits": self._logits(),
        }

    @property
    def _own(self) -> Iterable[Tensor]:
        """The drafter's parameters but for those of its target's that it reads in place."""
        shared = self.config.kind is MTP
        return (p for p in self.model.parameters() if p.requires_grad or not shared)

    def _state(self) -> dict[str, int]:
        """Bytes that training keeps besides the weights, found by a step without values."""
        optimizer = DraftOptimizer(copy.deepcopy(self.model), self.recipe)
        gradients = sum(gradient.nbytes for gradient in optimizer.gradients())
        optimizer.step(0.0, 1.0)
        kept = optimizer.state()
        masters = sum(
            kept.pop(f"{name}.master").nbytes * (parameter.dtype != torch.float32)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        )
        state = sum(tensor.nbytes for tensor in kept.values())
        return {"float32 weights": masters, "gradients": gradients, "optimizer": state}

    def _context_activations(self, tokens: int) -> int:
        """Bytes of depth 0's activations, and of float32 gradients on its keys and values."""
        shape = self.config.transformer
        keys_and_values = 2 * self.config.attention.kv_width
        layers = len(shape.layers)
        gradients = tokens * layers * keys_and_values * FLOAT32 * self._one_pass
        if self.config.kind is DFLASH:  # as projected, and as normed and turned
            projected = layers * 2 * (self.config.attention.width + keys_and_values)
            return tokens * (projected + 2 * shape.hidden_size) * self.dtype.itemsize + gradients
        if not (self.recipe.activation_checkpointing and self._one_pass):
            return self._activations(tokens, tokens) + gradients
        inputs = tokens * layers * (shape.hidden_size + keys_and_values) * self.dtype.itemsize
        return inputs + self._activations(tokens, tokens) // layers + gradients

    def _activations(self, elements: int, keys: int) -> int:
        """Bytes of the activations of some elements that attend to `keys` keys, in all layers."""
        shape = self.config.transformer
        numbers = len(shape.layers) * kept_by_layer(self.config, self.compiled)
        kept = elements * (numbers + 2 * shape.hidden_size) * self.dtype.itemsize
        if self.compiled:
            return kept
        scores = SCORES * elements * keys * self.config.attention.num_heads * FLOAT32
        return kept + scores * len(shape.layers)

    def _logits(self) -> int:
        """Bytes of one chunk's logits, and of two gradients of the head: depth 0's and a part's."""
        head = dense(self.model.readout.head.weight)
        most = max(self.step.largest_pass, self.step.largest_segment)
        vocabulary = self.config.draft_vocab_size
        matrix = min(most, chunk_rows(vocabulary)) * vocabulary * self.dtype.itemsize
        gradients = 2 * head.numel() * FLOAT32 * head.requires_grad
        return LOGITS[self.compiled] * matrix + gradients

    def operations(self) -> dict[str, int]:
        """Multiplications and additions of a step, by what computes them."""
        step, head = self.step, dense(self.model.readout.head.weight)
        # of products of the layers, of fc, which has no gradient of its input, and of the head
        each, of_fc, of_head = (6, 4, 6 if head.requires_grad else 4)
        if self.recipe.train == "selector":
            each = of_fc = of_head = 2
        through_fc = step.tokens + step.deeper * (self.config.kind is MTP)  # MTP's read tokens
        layers = self._layer_operations(step, each)
        if self.recipe.activation_checkpointing and self._one_pass:
            layers += 2 * step.tokens * self._in_context
        return {
            "target": self._target_operations(step) * (not self._cached),
            "draft layers": layers + of_fc * through_fc * self.model.fc.weight.numel(),
            "head and loss": self._head_operations(step, of_head),
        }

    def evaluation_operations(self) -> int:
        """Operations of one evaluation."""
        work = self.evaluation
        drafter = self._layer_operations(work, 2) + self._head_operations(work, 2)
        return drafter + self._target_operations(work) * (not self._cached)

    def caching_operations(self) -> int:
        """Operations of features that are computed once, before the first step."""
        rows = len(self.training) + len(self.validation)
        a_step = self._target_operations(self.step) * self._cached
        return a_step * rows // self.recipe.rows_per_step

    def _target_operations(self, work: Work) -> int:
        each = self.teacher.spec.attention.values()
        attention = sum(4 * heads.width * self._pairs_within(heads.window, work) for heads in each)
        return 2 * work.tokens * self.multiplied + attention

    def _pairs_within(self, window: int | None, work: Work) -> int:
        """Pairs of a target's layer; plain attention also computes those before its window."""
        if window is None or not self.compiled:
            return work.target_pairs
        return min(work.target_pairs, window * work.tokens)

    def _layer_operations(self, work: Work, each: int) -> int:
        """`each` per parameter and element: 2 for the forward pass, 4 more for the gradients.

        An upper bound: context outside the loss ends at the last layer's attention.
        """
        deeper = work.deeper * in_products(*self.model.blocks)
        products = each * (work.tokens * self._in_context + deeper)
        attention = sum(each.width for each in self.config.transformer.attention.values())
        return products + 2 * each * attention * work.draft_pairs

    def _head_operations(self, work: Work, each: int) -> int:
        """The drafter's head on every element; the target's twice at every place."""
        head = self.model.readout.head.weight.numel()
        return each * sum(work.loss_elements) * head + 2 * 2 * work.loss_elements[0] * head

    def seconds(self, operations: int, rate: float) -> float:
        """Time for some operations, given the rate of a bare product."""
        return operations / (ATTAINED[self.compiled] * rate)

    @property
    def evaluations(self) -> int:
        """Number of evaluations in the run."""
        return -(-self.recipe.steps // self.recipe.evaluate_every)

    def measure_rate(self, seconds: float = 0.3) -> float:
        """Operations per second of the draft layers' largest product, measured on the device."""
        products = (part.weight for part in self.model.blocks[0].modules() if type(part) is Linear)
        largest = max(map(dense, products), key=Tensor.numel)
        weight = torch.randn(largest.shape, dtype=self.dtype)
        rows = torch.randn(self.step.largest_pass, weight.shape[1], dtype=self.dtype)
        weight, rows = weight.to(self.device), rows.to(self.device)
        done, start = -1, time.perf_counter()  # the first one warms up
        while done < 1 or time.perf_counter() - start < seconds:
            F.linear(rows, weight)
            if self.compiled:
                torch.cuda.synchronize(self.device)
            done += 1
            start = time.perf_counter() if done == 0 else start
        return done * 2 * len(rows) * weight.numel() / (time.perf_counter() - start)


def part_of(parameter: str) -> str:
    """The part that a parameter belongs to."""
    return next(part for part, begins in PARTS.items() if parameter.startswith(begins))


def in_products(*modules: nn.Module) -> int:
    """Number of parameters that an element is multiplied by."""
    return sum(_multiplied(part) for module in modules for part in module.modules())


def _multiplied(part: nn.Module) -> int:
    """Those of one part itself; of its experts' weights, the share that an element uses."""
    if isinstance(part, Linear):
        return part.weight.numel()
    if isinstance(part, RoutedExperts):
        experts = part.gate_up.numel() + part.down.numel()
        return part.router.numel() + experts * part.top_k // len(part.router)
    return 0
