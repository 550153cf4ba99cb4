"""Models of a published size with random weights, to measure time with synthetic acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from peagle.bench.random_weights import PLAIN, RandomWeights, Weights, random_target, target_bytes
from peagle.config import EngineConfig
from peagle.device import resolve_device, resolve_dtype
from peagle.drafters.drafter import Drafter
from peagle.drafters.methods import drafter_for
from peagle.drafters.model import DrafterConfig, DraftModel, default_taps, heads_like
from peagle.drafters.mtp import MTPHead
from peagle.drafters.selector import SelectorConfig
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.models.spec import (
    AttentionSpec,
    ClampedSwiGLU,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MixtureSpec,
    MLPSpec,
    NormSpec,
    ScaledSandwichSpec,
    SharedExpertsSpec,
)
from peagle.ops.delta_net import DeltaHeads
from peagle.ops.rope import RopeConfig
from peagle.set_acceptance import SetAcceptance

REDUCED_VOCABULARY = 32_000
MASK_TOKEN = 151_643


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


_HEADS = AttentionSpec(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig(theta=1e6, original_max_position=40_960),
    qk_norm=True,
)
_FEW_KV_HEADS = replace(_HEADS, num_kv_heads=4)
_EXPERTS = ExpertsSpec(
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    intermediate_size=6144,
    norm_topk_prob=True,
)
_FEW_EXPERTS = replace(_EXPERTS, moe_intermediate_size=512, intermediate_size=512)
_SMALL_ROPE = replace(_HEADS.rope, original_max_position=1024)
_SMALL_HEADS = replace(_HEADS, num_heads=4, num_kv_heads=2, head_dim=16, rope=_SMALL_ROPE)
_QWEN3_8B = DecoderSpec(
    vocab_size=151_936,
    hidden_size=4096,
    layers=36 * (LayerSpec(_HEADS, MLPSpec(12_288)),),
    max_length=40_960,
)
_QWEN3_30B_A3B = replace(
    _QWEN3_8B, hidden_size=2048, layers=48 * (LayerSpec(_FEW_KV_HEADS, _EXPERTS),)
)
_QWEN3_32B = replace(
    _QWEN3_8B,
    hidden_size=5120,
    layers=64 * (LayerSpec(replace(_HEADS, num_heads=64), MLPSpec(25_600)),),
)
_GPT_OSS_HEADS = AttentionSpec(
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    rope=RopeConfig(
        theta=150_000.0, kind="yarn", factor=32.0, original_max_position=4096, truncate=False
    ),
    sinks=True,
    bias=True,
    out_bias=True,
)
_GPT_OSS_EXPERTS = ExpertsSpec(
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=2880,
    intermediate_size=2880,
    norm_topk_prob=True,
    activation=ClampedSwiGLU(limit=7.0),
)
_GPT_OSS_20B = DecoderSpec(
    vocab_size=201_088,
    hidden_size=2880,
    layers=12
    * (
        LayerSpec(replace(_GPT_OSS_HEADS, window=128), _GPT_OSS_EXPERTS),
        LayerSpec(_GPT_OSS_HEADS, _GPT_OSS_EXPERTS),
    ),
    max_length=131_072,
)
_MANY_EXPERTS = replace(_GPT_OSS_EXPERTS, num_experts=128)
_GPT_OSS_120B = replace(
    _GPT_OSS_20B,
    layers=18
    * tuple(replace(layer, feed_forward=_MANY_EXPERTS) for layer in _GPT_OSS_20B.layers[:2]),
)
_GEMMA_SLIDING = AttentionSpec(
    num_heads=32,
    num_kv_heads=16,
    head_dim=256,
    rope=RopeConfig(theta=10_000.0, original_max_position=262_144),
    window=1024,
    qk_norm=True,
    v_norm=True,
    scale=1.0,
)
_GEMMA_FULL = replace(
    _GEMMA_SLIDING,
    num_kv_heads=4,
    head_dim=512,
    rope=RopeConfig(
        theta=1e6, kind="proportional", partial_rotary_factor=0.25, original_max_position=262_144
    ),
    window=None,
    k_eq_v=True,
)
_GEMMA_MLP = MLPSpec(21_504, activation="gelu_tanh")
_GEMMA_4_31B = DecoderSpec(
    vocab_size=262_144,
    hidden_size=5376,
    layers=10
    * (
        *5 * (LayerSpec(_GEMMA_SLIDING, _GEMMA_MLP, ScaledSandwichSpec()),),
        LayerSpec(_GEMMA_FULL, _GEMMA_MLP, ScaledSandwichSpec()),
    ),
    max_length=262_144,
    tie_word_embeddings=True,
    embedding_scale=5376**0.5,
    logit_softcap=30.0,
)
_GEMMA_EXPERTS = LayerSpec(
    replace(_GEMMA_SLIDING, num_heads=16, num_kv_heads=8),
    MixtureSpec(
        MLPSpec(2112, activation="gelu_tanh"),
        ExpertsSpec(
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=704,
            intermediate_size=704,
            norm_topk_prob=True,
            activation="gelu_tanh",
        ),
    ),
    ScaledSandwichSpec(),
)
_GEMMA_4_26B = replace(
    _GEMMA_4_31B,
    hidden_size=2816,
    layers=5
    * (
        *5 * (_GEMMA_EXPERTS,),
        replace(_GEMMA_EXPERTS, mixer=replace(_GEMMA_FULL, num_heads=16, num_kv_heads=2)),
    ),
    embedding_scale=2816**0.5,
)
_DELTA_NET = DeltaHeads(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128)
_FEWER_STATES = replace(_DELTA_NET, num_value_heads=32)
_GATED = AttentionSpec(
    num_heads=24,
    num_kv_heads=4,
    head_dim=256,
    rope=RopeConfig(theta=1e7, partial_rotary_factor=0.25, original_max_position=262_144),
    qk_norm=True,
    gated=True,
)
_QWEN3_5_MLP, _CENTRED = MLPSpec(17_408), NormSpec(offset=1.0)
_QWEN3_8_27B = DecoderSpec(
    vocab_size=248_320,
    hidden_size=5120,
    layers=16
    * (
        *3 * (LayerSpec(_DELTA_NET, _QWEN3_5_MLP, _CENTRED),),
        LayerSpec(_GATED, _QWEN3_5_MLP, _CENTRED),
    ),
    norm=_CENTRED,
    max_length=262_144,
)
_SHARED_EXPERTS = SharedExpertsSpec(MLPSpec(512), replace(_FEW_EXPERTS, num_experts=256))
_QWEN3_6_35B_A3B = replace(
    _QWEN3_8_27B,
    hidden_size=2048,
    layers=10
    * (
        *3 * (LayerSpec(_FEWER_STATES, _SHARED_EXPERTS, _CENTRED),),
        LayerSpec(replace(_GATED, num_heads=16, num_kv_heads=2), _SHARED_EXPERTS, _CENTRED),
    ),
)
_TINY_HYBRID = DecoderSpec(
    vocab_size=512,
    hidden_size=64,
    layers=2
    * (
        *3 * (LayerSpec(DeltaHeads(2, 4, 16, 16), MLPSpec(128), _CENTRED),),
        LayerSpec(replace(_SMALL_HEADS, gated=True), MLPSpec(128), _CENTRED),
    ),
    norm=_CENTRED,
    max_length=1024,
)
_TINY = DecoderSpec(
    vocab_size=512,
    hidden_size=64,
    layers=8 * (LayerSpec(_SMALL_HEADS, MLPSpec(128)),),
    max_length=1024,
)
SHAPES = {
    "qwen3-8b": Shape(_QWEN3_8B, 12_288),
    "qwen3-8b-full-head": Shape(_QWEN3_8B, 12_288, _QWEN3_8B.vocab_size),
    "qwen3-30b-a3b": Shape(_QWEN3_30B_A3B, 8192),
    "qwen3-8b-fp8": Shape(_QWEN3_8B, 12_288, weights=Weights("fp8")),
    "qwen3-30b-a3b-fp8": Shape(_QWEN3_30B_A3B, 8192, weights=Weights("fp8", "half")),
    "qwen3-8b-int4": Shape(_QWEN3_8B, 12_288, weights=Weights("int4")),
    "qwen3-32b-int4": Shape(_QWEN3_32B, 25_600, weights=Weights("int4")),
    "qwen3-32b-nvfp4": Shape(_QWEN3_32B, 25_600, weights=Weights("nvfp4")),
    "qwen3-30b-a3b-nvfp4": Shape(_QWEN3_30B_A3B, 8192, weights=Weights("nvfp4", "half")),
    "gpt-oss-20b": Shape(_GPT_OSS_20B, 14_336, 201_088, Weights("mxfp4", "half")),
    "gpt-oss-120b": Shape(_GPT_OSS_120B, 11_520, 201_088, Weights("mxfp4", "half")),
    "gemma-4-31b": Shape(_GEMMA_4_31B, 21_504),
    "gemma-4-26b-a4b": Shape(_GEMMA_4_26B, 8192),
    "gemma-4-31b-fp8": Shape(_GEMMA_4_31B, 21_504, weights=Weights("fp8")),
    "gemma-4-31b-nvfp4": Shape(_GEMMA_4_31B, 21_504, weights=Weights("nvfp4")),
    "qwen3.8-27b": Shape(_QWEN3_8_27B, 17_408),
    "qwen3.8-27b-fp8": Shape(_QWEN3_8_27B, 17_408, weights=Weights("fp8")),
    "qwen3.6-35b-a3b": Shape(_QWEN3_6_35B_A3B, 8192),
    "qwen3.6-35b-a3b-fp8": Shape(_QWEN3_6_35B_A3B, 8192, weights=Weights("fp8", "half")),
    "tiny-hybrid": Shape(_TINY_HYBRID, 128, _TINY_HYBRID.vocab_size),
    "tiny": Shape(_TINY, 128, _TINY.vocab_size),
}


def shape_of(name: str) -> Shape:
    """The shape called `name`. Raises `InputError` for an unknown one."""
    if name not in SHAPES:
        raise InputError(f"shape {name} is not known; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def random_drafter(
    shape: Shape, parallel: bool, layers: int, device: torch.device, dtype: torch.dtype
) -> Drafter:
    """A dense drafter with random weights for a shape's target."""
    model = _draft_model(shape, parallel, layers, shape.target.max_length)
    RandomWeights(device, dtype).fill(model)
    return drafter_for(model)


def random_mtp(target: Decoder, weights: Weights) -> Drafter:
    """A target's own head with random weights, its layer in the target's format."""
    model, like = MTPHead(target), target.embed.weight
    own = model.embedding_norm, model.hidden_norm, model.fc, model.layer, model.readout.norm
    source = RandomWeights(like.device, like.dtype, weights.quantization)
    source.fill(nn.ModuleList(own))
    return drafter_for(model.to(like.device).eval())


def draft_config(shape: Shape, parallel: bool, layers: int) -> DrafterConfig:
    """The drafter of a shape's target: a plain decoder with the heads of its first layer."""
    target = shape.target
    heads = replace(heads_like(target), qk_norm=False)
    layer = LayerSpec(heads, MLPSpec(shape.draft_intermediate_size))
    sizes = target.vocab_size, target.hidden_size
    return DrafterConfig(
        transformer=DecoderSpec(*sizes, layers * (layer,), max_length=target.max_length),
        target_hidden_size=target.hidden_size,
        taps=default_taps(len(target.layers)),
        draft_vocab_size=shape.draft_vocab_size,
        mask_token_id=min(MASK_TOKEN, target.vocab_size - 1) if parallel else None,
        selector=shape.selector if parallel else None,
    )


def _draft_model(shape: Shape, parallel: bool, layers: int, max_length: int) -> DraftModel:
    """A drafter without weights."""
    with torch.device("meta"):
        return DraftModel(draft_config(shape, parallel, layers), max_length)


def weight_bytes(name: str, method: str, layers: int, dtype: torch.dtype) -> int:
    """Bytes of a shape's target, in its format, and of its drafter."""
    shape = shape_of(name)
    drafter = _draft_parameters(shape, method, layers) * dtype.itemsize
    return target_bytes(shape.target, dtype, shape.weights) + drafter


def _draft_parameters(shape: Shape, method: str, layers: int) -> int:
    if method == "none":
        return 0
    if method == "mtp":
        with torch.device("meta"):
            target = Decoder(shape.target, max_length=1)
        shared = {*target.parameters()}
        return sum(p.numel() for p in MTPHead(target).parameters() if p not in shared)
    model = _draft_model(shape, method == "peagle", layers, max_length=1)
    return sum(value.numel() for value in model.parameters())


def random_engine(
    name: str,
    method: str,
    k: int,
    layers: int,
    rates: Sequence[float] | None,
    config: EngineConfig,
) -> Engine:
    """An engine over a shape; `method` is none, eagle3 or peagle; rates: as of `SetAcceptance`.

    Raises `InputError` for an unknown shape or too little memory.
    """
    device = resolve_device(config.device)
    models = random_models(name, method, layers, device, resolve_dtype(config.dtype, device))
    if method == "none":
        return Engine(*models, 0, config)
    acceptance = None if rates is None else SetAcceptance(rates)
    return Engine(*models, k, config, acceptance=acceptance)


def random_models(
    name: str, method: str, layers: int, device: torch.device, dtype: torch.dtype
) -> tuple[Decoder, Drafter | None]:
    """A shape's target and drafter; `method` as of `random_engine`. Raises `InputError`."""
    shape = shape_of(name)
    target = random_target(shape.target, device, dtype, shape.weights)
    if method == "none":
        return target, None
    return target, random_drafter(shape, method == "peagle", layers, device, dtype)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 1) -> Sequence[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(10, vocab_size - 1, (count, length), generator=generator)
    prompts: list[list[int]] = drawn.tolist()
    return prompts
