"""Recipe: one frozen object that describes a training run."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, Field

from peagle.configuration import Config, NonNegativeInt, PositiveInt
from peagle.drafters.kind import KIND_OF_METHOD, Kind
from peagle.errors import InputError, about
from peagle.files import read_yaml

Share = Annotated[float, Field(gt=0.0, le=1.0)]
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
FeatureDType = Literal["bfloat16", "fp8"]
IDLE: dict[str, list[str]] = read_yaml(Path(__file__).with_name("idle_keys.yaml"))
"""Keys that decide nothing: by method, and beside what the file says."""


class Recipe(Config):
    """What to train, on what, and how. The words are the paper's."""

    target: str
    """The target's directory or hub id."""
    lora: UserPath | None = None
    """Directory or hub id of a LoRA adapter in PEFT's layout, merged into the target's weights."""
    data: Annotated[tuple[UserPath, ...], Field(min_length=1)]
    """JSONL files, also .gz, or hf:ID_OR_PATH[:SPLIT] for datasets; read in this order."""
    output: UserPath
    """Directory of the drafter; the best checkpoint so far is always there."""
    method: Literal["peagle", "eagle3", "dflash", "mtp"] = "peagle"
    """mtp: go on with the head in the files of a Qwen3.5 to 3.8."""

    num_hidden_layers: PositiveInt = 4
    intermediate_size: PositiveInt | None = None
    """Unset: the target's."""
    qk_norm: bool | None = None
    """Qwen3-style layers (true) or Llama-style (false); unset: the target's style."""
    sliding_window: PositiveInt | None = None
    """Positions that a draft layer sees, its own included. Unset: all. It bounds the drafter's
    memory; without it acceptance is higher up to some 10,000 tokens."""
    full_attention_layers: tuple[NonNegativeInt, ...] = ()
    """Draft layers, counted from 0, that see all positions beside windowed ones: vLLM serves no
    such P-EAGLE drafter."""
    draft_vocab_size: PositiveInt | None = None
    """Keep this many of the most frequent response tokens; unset: keep the whole vocabulary."""
    taps: Annotated[tuple[int, ...], Field(min_length=1)] | None = None
    """Target layers read as features; unset: 2, N // 2, N - 3."""
    train_embeddings: bool | None = None
    """Unset: P-EAGLE learns its own, as its mask token must; others share the target's."""
    train_head: bool | None = None
    """The head starts as the target's; with it frozen, a step is faster and takes less memory.
    Unset: it learns, but DFlash's and MTP's, which is the target's."""
    mask_token_id: NonNegativeInt | None = None
    """A token that never occurs in text; P-EAGLE and DFlash, and required there."""
    norm_before_residual: bool = False
    initial_drafter: str | None = None
    """A drafter's directory or hub id to train on from; it decides the layers, taps and vocabulary.
    Unset: a new drafter; for MTP the head in the target's files."""
    selector_rank: PositiveInt | None = None
    """Learn a selector, which corrects each draft by the one before it; 64 to 256 (P-EAGLE only).
    Unset: none, or that of `initial_drafter`."""
    selector_candidates: Annotated[int, Field(ge=2)] = 16
    """The likeliest drafts of each slot, among which a selector selects."""
    train: Literal["all", "selector"] = "all"
    """selector: leave the rest of `initial_drafter` as it is."""

    num_speculative_tokens: PositiveInt = 8
    """K_train: how many tokens ahead the drafter learns to propose; a DFlash block has one row
    more."""
    anchors: PositiveInt = 512
    """Blocks of a step that each of its rows has on average, behind tokens drawn from all
    (DFlash only)."""
    cod_ratio: Share = 0.8
    """r: depth d keeps about r**d of the anchors (P-EAGLE only)."""
    cod_floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """The least share of anchors that any depth keeps (P-EAGLE only)."""
    depth_decay: Share | None = None
    """Weight of depth d in the loss is depth_decay**d. Unset: 1; for DFlash exp(-1 / g), where g
    is its paper's 4 for blocks of 8 rows, 7 for 16, and on that line for others."""
    dpace: Share | None = None
    """D-PACE's smoothing, 0.5 in its paper: weigh an element by how many tokens are expected to be
    accepted through it (not for EAGLE-3 and MTP). Unset: all elements of a depth weigh the same."""
    loss: Literal["kl", "cross_entropy"] = "kl"
    """Divergence from the target's distribution, or cross-entropy with the target's most likely
    token. Over the draft ids alone where `draft_vocab_size` reduces the vocabulary."""

    target_backend: Literal["auto", "own", "transformers"] = "auto"
    """What computes the target's hidden states: peagle's own decoder, or transformers' model.
    auto: our own where the family is ours."""
    shard_target: bool = False
    """Under torchrun, each process keeps a part of every target layer (FSDP2)."""
    features: Literal["online", "cached"] = "online"
    """Hidden states of the target: computed at every step, or once and kept on disk."""
    feature_cache: UserPath | None = None
    """Directory of the cached features."""
    feature_source: UserPath | None = None
    """What has the features to cache: the URL of a vLLM that writes hidden states to a disk here,
    or a directory of speculators'. Unset: they are computed here."""
    feature_dtype: FeatureDType = "bfloat16"
    """Dtype of the cached features; fp8 is half the size, with a scale for each token and layer."""

    row_length: PositiveInt = 2048
    """Tokens in one packed row."""
    overlong: Literal["cut", "split", "drop"] = "cut"
    """A sample longer than a row loses its end, becomes several documents, or is left out."""
    rows_per_step: PositiveInt = 8
    rows_per_pass: PositiveInt = 1
    """Rows that go through the models together; the gradients of a step's passes are added up."""
    elements_per_segment: PositiveInt | None = None
    """Elements deeper than 0, or rows of blocks, that go through the drafter together (not for
    EAGLE-3 and MTP); bounds memory, not results, but for `dpace`, whose weights have a mean of 1 in
    each. Unset: 6,144, on a GPU more for a drafter smaller than Qwen3-8B's, in the same memory."""
    steps: PositiveInt
    activation_checkpointing: bool = False
    """Recompute depth 0's layers for the gradient: a third of its time for most of its memory
    (P-EAGLE only)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the layers' matrices, AdamW for the rest; the bundled drafters' choice."""
    learning_rate: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-4
    warmup_steps: NonNegativeInt = 50
    """Steps to the full learning rate; a run of no more steps than these takes half of its own."""
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    gradient_clip: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    validation_documents: PositiveInt = 64
    """Documents held out, drawn by seed; all pieces of a split sample stay together."""
    evaluate_every: PositiveInt = 250
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    device: str = "auto"

    def model_post_init(self, _: Any) -> None:
        self._fit_method()
        self._fit_initial_drafter()
        self._fit_windows()
        self._fit_output()

    def _fit_method(self) -> None:
        if self.kind.parallel_drafting and self.mask_token_id is None:
            raise ValueError(
                f"method {self.method} needs mask_token_id, an id that never occurs in text (how "
                "to choose it: docs/first-drafter.md)"
            )
        if not self.kind.parallel_drafting and self.mask_token_id is not None:
            raise ValueError(f"method {self.method} has no mask slots; leave mask_token_id out")
        if idle := self._idle(self.method):
            raise ValueError(f"method {self.method} makes no use of {idle}; leave that out")

    def _fit_initial_drafter(self) -> None:
        if self.initial_drafter is not None and (idle := self._idle("initial_drafter")):
            raise ValueError(f"{idle} cannot be chosen: initial_drafter decides; leave that out")
        if self.train == "selector" and self.initial_drafter is None:
            raise ValueError("train selector needs initial_drafter, the drafter that it corrects")
        if self.train == "selector" and self.method == "eagle3":
            raise ValueError("method eagle3 has no mask slots that a selector could correct")
        if self.train == "selector" and (idle := self._idle("selector")):
            raise ValueError(f"train selector makes no use of {idle}; leave that out")
        if self.train == "selector" and self.num_speculative_tokens == 1:
            raise ValueError("train selector needs num_speculative_tokens above 1: it corrects")
        if self.selector_rank is None and self._changes("selector_candidates"):
            raise ValueError("selector_candidates needs selector_rank")

    def _fit_windows(self) -> None:
        full = self.full_attention_layers
        if full and self.sliding_window is None:
            raise ValueError("full_attention_layers needs sliding_window, which others have")
        if full and max(full) >= self.num_hidden_layers:
            raise ValueError(
                f"full_attention_layers names layer {max(full)} of {self.num_hidden_layers}, "
                "counted from 0"
            )
        k = self.num_speculative_tokens
        if self.method == "eagle3" and (self.sliding_window or k) < k:
            raise ValueError(f"sliding_window hides drafts from one another; give at least {k}")

    def _fit_output(self) -> None:
        if Path(self.output).name in ("", ".."):
            raise ValueError(f"output {self.output!r} has no name; name a directory of its own")
        if self.features == "cached" and self.feature_cache is None:
            raise ValueError("cached features need feature_cache, a directory")
        if self.features == "online" and (idle := self._idle("online")):
            raise ValueError(
                f"{idle} has no effect on online features; leave that out or set features to cached"
            )

    def _idle(self, beside: str) -> str:
        """The keys that decide nothing beside something, and have another value than usual."""
        return ", ".join(key for key in IDLE[beside] if self._changes(key))

    def _changes(self, key: str) -> bool:
        """Whether a key has another value than its default, which a written recipe repeats."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    @property
    def kind(self) -> Kind:
        """The kind of drafter."""
        return KIND_OF_METHOD[self.method]

    @property
    def warmup(self) -> int:
        """Steps to the full learning rate, fewer than `steps`."""
        return self.warmup_steps if self.warmup_steps < self.steps else self.steps // 2

    @property
    def shares_embeddings(self) -> bool:
        """Whether the drafter uses the target's embeddings, and its directory has none."""
        if self.train_embeddings is None:
            return self.method != "peagle"
        return not self.train_embeddings

    @property
    def trains_head(self) -> bool:
        """Whether the head learns."""
        own = self.method not in ("dflash", "mtp")
        return own if self.train_head is None else self.train_head

    @property
    def decay(self) -> float:
        """Weight in the loss of a depth beside that of the one before."""
        if self.depth_decay is not None:
            return self.depth_decay
        rows = self.num_speculative_tokens + 1
        return math.exp(-1 / (1 + 3 * rows / 8)) if self.method == "dflash" else 1.0

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML recipe; each override is `key=value`, with a value in YAML.

        Raises `InputError` naming the file, the key or the override that is wrong.
        """
        values = read_yaml(path)
        for override in overrides:
            key, separator, value = override.partition("=")
            if not separator:
                raise InputError(f"override {override!r} is not of the form key=value")
            try:
                values[key] = yaml.safe_load(value)
            except (ValueError, yaml.YAMLError):
                raise InputError(f"override {override!r}: {value!r} is not YAML") from None
        wrong = next((key for key in values if not isinstance(key, str)), None)
        if wrong is not None:
            raise InputError(f"{path}: {wrong!r} is not a key of a recipe")
        with about(f"{path}{' and overrides' * bool(overrides)}"):
            return cls(**values)
