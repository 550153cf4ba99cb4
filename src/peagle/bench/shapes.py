"""Models of a published size with random weights, to measure time with synthetic acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peagle.bench.random_weights import PLAIN, RandomWeights, Weights, target_bytes
from peagle.drafters.checkpoint import EMBEDDINGS, HEAD, attach_shared
from peagle.drafters.dflash import BlockConfig, BlockModel, default_block_taps
from peagle.drafters.methods import drafter_for
from peagle.drafters.model import DrafterConfig, DraftModel, default_taps, heads_like
from peagle.drafters.mtp import MTPHead
from peagle.drafters.network import Network
from peagle.drafters.proposer import Drafter
from peagle.drafters.selector import SelectorConfig
from peagle.errors import InputError
from peagle.files import read_yaml
from peagle.models.decoder import Decoder
from peagle.models.families import read_values
from peagle.models.spec import DecoderSpec, LayerSpec, MLPSpec

SIZES = Path(__file__).with_name("shapes.yaml")
REDUCED_VOCABULARY = 32_000
MASK_TOKEN = 151_643
DRAFT_LAYERS = {"peagle": 4, "eagle3": 1}
"""Layers of drafters by their method."""
BLOCK_SIZE, BLOCK_LAYERS = 16, 5
"""Of a DFlash head, as published ones for Qwen3-8B have them."""


@dataclass(frozen=True)
class Shape:
    """A target's sizes, and the sizes in which its drafters differ from it."""

    target: DecoderSpec
    draft_intermediate_size: int
    draft_vocab_size: int = REDUCED_VOCABULARY
    weights: Weights = PLAIN
    """What the target's random weights are like."""
    selector: SelectorConfig | None = None
    """Of its P-EAGLE drafter."""


def _shape(name: str, values: dict[str, Any]) -> Shape:
    """A shape as the file has it."""
    _, target = read_values(values.pop("target"), f"shape {name}")
    return Shape(target, weights=Weights(**values.pop("weights", {})), **values)


SHAPES = {name: _shape(name, values) for name, values in read_yaml(SIZES).items()}


def shape_of(name: str) -> Shape:
    """The shape called `name`. Raises `InputError` for an unknown one."""
    if name not in SHAPES:
        raise InputError(f"shape {name} is not known; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def random_proposer(shape: Shape, method: str, target: Decoder) -> Drafter | None:
    """What drafts by a method for a shape's target, with random weights; None: nothing does."""
    if method == "none":
        return None
    if method == "mtp":
        return random_mtp(target, shape.weights)
    if method == "dflash":
        return random_block(shape, target)
    like = target.embed.weight
    return random_drafter(shape, method, like.device, like.dtype)


def random_drafter(shape: Shape, method: str, device: torch.device, dtype: torch.dtype) -> Drafter:
    """A dense drafter with random weights for a shape's target. method: of `DRAFT_LAYERS`."""
    model = _draft_model(shape, method, shape.target.max_length)
    RandomWeights(device, dtype).fill(model)
    return drafter_for(model)


def random_mtp(target: Decoder, weights: Weights) -> Drafter:
    """A target's own head with random weights, its layer in the target's format."""
    model, like = MTPHead(target), target.embed.weight
    source = RandomWeights(like.device, like.dtype, weights.quantization)
    source.fill(nn.ModuleList(model.own))
    return drafter_for(model.to(like.device).eval())


def random_block(shape: Shape, target: Decoder) -> Drafter:
    """A DFlash head with random weights, and the target's embeddings and head."""
    model = _block_model(shape, target)
    own, like = (model.fc, model.hidden_norm, model.layers, model.readout.norm), target.embed.weight
    RandomWeights(like.device, like.dtype).fill(nn.ModuleList(own))
    return drafter_for(model.to(like.device).eval())


def block_config(shape: Shape) -> BlockConfig:
    """A DFlash head of the target's widths."""
    target = shape.target
    return BlockConfig(
        transformer=_draft_layers(shape, BLOCK_LAYERS, qk_norm=True, causal=False),
        target_hidden_size=target.hidden_size,
        taps=default_block_taps(BLOCK_LAYERS, len(target.layers)),
        draft_vocab_size=target.vocab_size,
        mask_token_id=min(MASK_TOKEN, target.vocab_size - 1),
        block_size=BLOCK_SIZE,
        target_layers=len(target.layers),
    )


def _block_model(shape: Shape, target: Decoder) -> BlockModel:
    """A DFlash head without weights but for those of the target."""
    with torch.device("meta"):
        model = BlockModel(block_config(shape), shape.target.max_length)
    attach_shared(model, target, frozenset((EMBEDDINGS, HEAD)))
    return model


def draft_config(shape: Shape, method: str) -> DrafterConfig:
    """The drafter of a shape's target: a plain decoder with the heads of its first layer."""
    target, parallel = shape.target, method == "peagle"
    return DrafterConfig(
        transformer=_draft_layers(shape, DRAFT_LAYERS[method], qk_norm=False),
        target_hidden_size=target.hidden_size,
        taps=default_taps(len(target.layers)),
        draft_vocab_size=shape.draft_vocab_size,
        mask_token_id=min(MASK_TOKEN, target.vocab_size - 1) if parallel else None,
        selector=shape.selector if parallel else None,
    )


def _draft_layers(shape: Shape, count: int, **changes: Any) -> DecoderSpec:
    """So many layers of the target's width, their heads like its own but for some changes."""
    target = shape.target
    heads = replace(heads_like(target), **changes)
    layers = count * (LayerSpec(heads, MLPSpec(shape.draft_intermediate_size)),)
    sizes = target.vocab_size, target.hidden_size
    return DecoderSpec(*sizes, layers, max_length=target.max_length)


def _draft_model(shape: Shape, method: str, max_length: int) -> DraftModel:
    """A drafter without weights."""
    with torch.device("meta"):
        return DraftModel(draft_config(shape, method), max_length)


def weight_bytes(name: str, method: str, dtype: torch.dtype) -> int:
    """Bytes of a shape's target, in its format, and of its drafter."""
    shape = shape_of(name)
    drafter = _draft_parameters(shape, method) * dtype.itemsize
    return target_bytes(shape.target, dtype, shape.weights) + drafter


def _draft_parameters(shape: Shape, method: str) -> int:
    if method == "none":
        return 0
    if method in DRAFT_LAYERS:
        model: Network = _draft_model(shape, method, max_length=1)
        return sum(value.numel() for value in model.parameters())
    with torch.device("meta"):
        target = Decoder(shape.target, max_length=1)
        model = MTPHead(target) if method == "mtp" else _block_model(shape, target)
    shared = {*target.parameters()}
    return sum(value.numel() for value in model.parameters() if value not in shared)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 1) -> Sequence[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(10, vocab_size - 1, (count, length), generator=generator)
    return drawn.tolist()
