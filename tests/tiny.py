"""Tiny random models for tests: targets by transformers, drafters by us; and ways to run them."""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from blocks import check_blocks
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from peagle.config import EngineConfig, SamplingParams
from peagle.drafters.checkpoint import read_drafter, ready, save_drafter
from peagle.drafters.dflash import BlockModel
from peagle.drafters.dflash_checkpoint import read_dflash
from peagle.drafters.kind import Kind
from peagle.drafters.methods import drafter_for
from peagle.drafters.model import DrafterConfig, DraftModel
from peagle.drafters.proposer import Drafter, Proposer
from peagle.engine import worker
from peagle.engine.block_groups import WHOLE
from peagle.engine.engine import Engine
from peagle.engine.host.network import HostNetwork, KnownRows
from peagle.engine.host.proposals import HostProposerRows
from peagle.engine.kv_cache import KVCache
from peagle.engine.repeats import MOST_REPEATS, Repeats
from peagle.engine.request import Request, RequestOutput
from peagle.engine.request_table import RequestTable
from peagle.engine.spans import Span
from peagle.engine.step import BlockUpdate, Step
from peagle.models.decoder import Decoder
from peagle.models.ends import Ends
from peagle.models.loading import load_decoder
from peagle.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec
from peagle.ops import residual
from peagle.ops.cached_attention import QKV, AttentionHeads, attend_reference
from peagle.ops.linear import Linear
from peagle.ops.products.normed import Normed
from peagle.ops.rope import RopeConfig
from peagle.speculation import Speculation
from peagle.speculative_config import DrafterFormat
from peagle.train.features import DocumentRecur
from peagle.train.mask import Visibility
from peagle.train.packing import Batch

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
GPT_OSS = {
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "swiglu_limit": 2.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
"""A window that prompts outgrow, and a limit that activations reach."""
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
"""As the 31B, with a soft cap that logits reach."""
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
}
"""Beside the MLP, as in the 26B-A4B."""
GEMMA3 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "query_pre_attn_scalar": 20,
    "tie_word_embeddings": True,
}
YARN_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
"""As Ministral 3 has it; queries grow at every 16th position."""
SMOLLM3 = {"no_rope_layers": [1, 0, 1, 0], "tie_word_embeddings": True, "pad_token_id": 0}
SEED_OSS = {"attention_bias": True, "attention_out_bias": False}
PHI3 = {"partial_rotary_factor": 0.75, "pad_token_id": 0}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
}
QWEN3_5 = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
QWEN3_5_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
MUSE_GLIMMER = {"sliding_window": 7, "final_logit_softcapping": 3.0, "output_multiplier": 0.5}
TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}


def muse_glimmer(**sizes: Any) -> MuseGlimmerConfig:
    """The configuration of a Muse Glimmer: none is published without a tower for images."""
    tower = {**TOWER, "intermediate_size": 16, "patch_size": 2}
    tower |= {"pos_emb_height": 2, "pos_emb_width": 2}
    sizes = {**sizes, "pad_token_id": 0}
    return MuseGlimmerConfig(text_config=sizes, vision_config=tower, projector_hidden_size=16)


KINDS = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, SIZES),
    "qwen3_windows": (Qwen3Config, Qwen3ForCausalLM, {**SIZES, **WINDOWS}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**SIZES, **EXPERTS}),
    "llama": (LlamaConfig, LlamaForCausalLM, SIZES),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {**SIZES, **GPT_OSS},
    ),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {**SIZES, **QWEN3_5}),
    "qwen3_5_moe": (
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        {**SIZES, **QWEN3_5, **QWEN3_5_EXPERTS},
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {**SIZES, **QWEN3_5, **QWEN3_5_EXPERTS, "linear_key_head_dim": 8},
    ),
    "muse_glimmer": (
        muse_glimmer,
        MuseGlimmerForConditionalGeneration,
        {**SIZES, **MUSE_GLIMMER},
    ),
    "gemma4_unified": (Gemma4UnifiedTextConfig, Gemma4UnifiedForCausalLM, {**SIZES, **GEMMA4}),
    "gemma4": (Gemma4TextConfig, Gemma4ForCausalLM, {**SIZES, **GEMMA4}),
    "gemma4_moe": (Gemma4TextConfig, Gemma4ForCausalLM, {**SIZES, **GEMMA4, **GEMMA4_EXPERTS}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {**SIZES, **GEMMA3}),
    "mistral": (MistralConfig, MistralForCausalLM, {**SIZES, "sliding_window": 7}),
    "ministral": (MinistralConfig, MinistralForCausalLM, {**SIZES, **WINDOWS}),
    "ministral3": (
        Ministral3Config,
        Ministral3ForCausalLM,
        {**SIZES, "rope_parameters": YARN_GROWING},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {**SIZES, **WINDOWS}),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {**SIZES, **SMOLLM3}),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM, {**SIZES, **SEED_OSS}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {**SIZES, **PHI3}),
    "granite": (GraniteConfig, GraniteForCausalLM, {**SIZES, **GRANITE}),
}
TAPS = (1, 2, 3)
MASK = VOCAB - 1
CPU = torch.device("cpu")


def save_target(
    directory: Path,
    family: str = "qwen3",
    seed: int = 0,
    layer_std: float = 0.15,
    **changes: object,
) -> Path:
    """A random target in Hugging Face's layout, with logits far enough apart to rank firmly.

    A small `layer_std` makes the next token depend mostly on the newest one: easy to draft for.
    """
    torch.manual_seed(seed)
    config_type, model_type, sizes = KINDS[family]
    model = model_type(config_type(**{**sizes, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=layer_std if ".layers." in name else 0.15)
        else:
            centre = 0.0 if stands_beside_one(family, name) else 1.0
            torch.nn.init.uniform_(parameter, centre - 0.3, centre + 0.3)
            parameter.data = parameter.data.bfloat16().float()  # as published
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.7, 1.3)
    model.float().save_pretrained(directory)
    return directory


def stands_beside_one(family: str, name: str) -> bool:
    """Whether a file holds a norm's weight as what it is beside 1."""
    if family == "muse_glimmer":
        return "language_model.layers." in name
    centred = family.startswith(("qwen3_5", "qwen3_next", "gemma3"))
    return centred and "linear_attn" not in name


def seen_pairs(visibility: Visibility) -> Tensor:
    """[queries, keys] bool: which keys a training pass lets each query see."""
    seen = torch.zeros(visibility.queries, visibility.keys, dtype=torch.bool)
    for rows, keys, part in visibility.tiles():
        seen[rows.start : rows.stop, keys] = part
    return seen


def peer_mtp_layer(peer: Any) -> torch.nn.Module:
    """Transformers' module of the layer of a Qwen3.5's own head, without values."""
    attending = peer.config.layer_types.index("full_attention")
    layer: torch.nn.Module = type(peer.model.layers[0])(peer.config, attending)
    return layer.eval()


@torch.no_grad()
def add_mtp(directory: Path, layer_std: float = 0.03) -> Path:
    """Put a head of its own beside a Qwen3.5's tensors; it takes the next token to depend mostly on
    the newest one, as a target with small layers does."""
    torch.manual_seed(2)
    tensors = load_file(directory / "model.safetensors")
    size = tensors["model.norm.weight"].shape[0]
    own = {
        f"layers.0.{name}": v
        for name, v in peer_mtp_layer(load_peer(directory)).state_dict().items()
    }
    own |= {
        name: torch.empty(size) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    own = {name if "." in name else f"{name}.weight": value for name, value in own.items()}
    for name, value in own.items():
        if "norm" in name:
            torch.nn.init.uniform_(value, -0.3, 0.3)
        else:
            torch.nn.init.normal_(value, std=layer_std)
    own["fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    own["fc.weight"] += layer_std * torch.randn(size, 2 * size)
    own["norm.weight"] = tensors["model.norm.weight"].clone()
    tensors |= {f"mtp.{name}": value for name, value in own.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def save_whole_gemma4(directory: Path, text: Path) -> Path:
    """A Gemma 4 target as it is published, towers for images and audio around a language model."""
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma4Config(
        text_config=Gemma4TextConfig.from_pretrained(text),
        vision_config={**tower, "intermediate_size": 16, "head_dim": 16, "num_key_value_heads": 1},
        audio_config={**tower, "subsampling_conv_channels": [4, 4], "output_proj_dims": 16},
    )
    model = Gemma4ForConditionalGeneration(config)
    inner = Gemma4ForCausalLM.from_pretrained(text)
    model.model.language_model.load_state_dict(inner.model.state_dict())
    model.save_pretrained(directory)
    return directory


def save_whole_gemma4_unified(directory: Path, text: Path) -> Path:
    """A Gemma 4 12B as it is published, with what makes rows of images and sounds."""
    size = json.loads((text / "config.json").read_text())["hidden_size"]
    config = Gemma4UnifiedConfig(
        text_config=Gemma4UnifiedTextConfig.from_pretrained(text),
        vision_config={"mm_embed_dim": size, "mm_posemb_size": 4, "output_proj_dims": size},
        audio_config={"audio_embed_dim": 16},
    )
    model = Gemma4UnifiedForConditionalGeneration(config)
    model.model.language_model.load_state_dict(load_peer(text).model.state_dict())
    model.save_pretrained(directory)
    return directory


def save_whole_gemma3(directory: Path, text: Path) -> Path:
    """A Gemma 3 target as it is published, a tower for images beside a language model."""
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(
        text_config=json.loads((text / "config.json").read_text()),
        vision_config={**tower, "intermediate_size": 16, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    model = Gemma3ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(load_peer(text).model.state_dict())
    model.save_pretrained(directory)
    return directory


def save_whole_mistral3(directory: Path, text: Path, tied: bool) -> Path:
    """A Mistral as it is published since Small 3.1, a tower for images beside a language model."""
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16}
    config = Mistral3Config(
        text_config=json.loads((text / "config.json").read_text()),
        vision_config={"model_type": "pixtral", **tower, "intermediate_size": 16},
        tie_word_embeddings=tied,
    )
    model = Mistral3ForConditionalGeneration(config)
    inner = load_peer(text)
    model.model.language_model.load_state_dict(inner.model.state_dict())
    if not tied:
        model.lm_head.load_state_dict(inner.lm_head.state_dict())
    model.save_pretrained(directory)
    return directory


def pack_experts(directory: Path) -> Path:
    """Put other experts in place of a GPT-OSS target's, in MXFP4 as published directories have."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 125, groups, dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*kept, "lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


ATTENTION = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(original_max_position=256)
)
DRAFT_LAYER = LayerSpec(ATTENTION, MLPSpec(96))


def drafter_config(
    parallel: bool,
    qk_norm: bool = True,
    layers: int = 2,
    draft_vocab: int = VOCAB,
    vocab_size: int = VOCAB,
    layer: LayerSpec = DRAFT_LAYER,
    windows: Sequence[int | None] = (),
    **changes: object,
) -> DrafterConfig:
    """A drafter's sizes for `save_target`'s default target. windows: each layer's, all full by
    default."""
    heads = replace(layer.attention, qk_norm=qk_norm)
    each = [replace(heads, window=window) for window in windows or layers * [None]]
    stack = tuple(replace(layer, mixer=attention) for attention in each)
    values = {
        "transformer": DecoderSpec(vocab_size, 64, layers=stack, max_length=256),
        "target_hidden_size": 64,
        "taps": TAPS,
        "draft_vocab_size": draft_vocab,
        "mask_token_id": MASK if parallel else None,
        "trained_tokens": 8,
        **changes,
    }
    return DrafterConfig(**values)  # type: ignore[arg-type]


def random_drafter(config: DrafterConfig, seed: int = 1) -> DraftModel:
    """An untrained drafter; a reduced vocabulary keeps every other token, then the next ones."""
    torch.manual_seed(seed)
    model = DraftModel(config, 256)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.7, 1.3)
        else:
            torch.nn.init.normal_(parameter, std=0.15)
    if config.reduced_vocabulary:
        kept = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
        model.readout.d2t = kept - torch.arange(config.draft_vocab_size)
    return model


def save_random_drafter(directory: Path, config: DrafterConfig, seed: int = 1) -> Path:
    """An untrained drafter on disk, in float32."""
    save_drafter(directory, random_drafter(config, seed), torch.float32)
    return directory


def load_target(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our decoder of a target."""
    return load_decoder(directory, dtype, CPU)


def load_peer(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Transformers' model of the same target: the oracle."""
    config = json.loads((directory / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0])
    return model.from_pretrained(directory, dtype=dtype).eval()


def causal(layer: int, qkv: QKV, heads: AttentionHeads) -> Tensor:
    """Attention of one whole sequence without a cache."""
    if not heads.full or heads.scale is not None:
        positions = torch.arange(len(qkv.query))
        return attend_reference(*qkv, positions, heads).view(qkv.query.shape)
    parts = (part.transpose(0, 1)[None] for part in qkv)
    attended = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return attended[0].transpose(0, 1)


@torch.no_grad()
def run_target(
    decoder: Decoder, tokens: Sequence[int], taps: tuple[int, ...] = TAPS
) -> tuple[Tensor, Tensor | None]:
    """Logits [tokens, vocab] and tapped hidden states [tokens, taps * hidden] of one sequence."""
    rows = torch.tensor(tokens)
    positions = torch.arange(len(rows))
    text = Batch(rows, positions, torch.ones_like(rows, dtype=torch.bool))
    hidden, tapped = decoder(rows, positions, causal, taps, DocumentRecur(text, CPU))
    return decoder.logits(hidden), tapped


@torch.no_grad()
def peer_logits(peer: Any, tokens: Sequence[int]) -> Tensor:
    """Transformers' logits [tokens, vocab] of one sequence."""
    return peer(torch.tensor([tokens])).logits[0]


def load_drafter(directory: Path, target: Ends, kind: Kind | None = None) -> DraftModel:
    """A drafter ready for inference."""
    return ready(read_drafter(directory, target, kind), None)


def load_dflash(
    directory: Path, target: Ends, quantization: DrafterFormat | None = None
) -> BlockModel:
    """The same of a DFlash head, rounded if asked."""
    return ready(read_dflash(directory, target), quantization)


def random_drafter_for(decoder: Decoder, directory: Path, config: DrafterConfig) -> Drafter:
    """An untrained drafter, written, and loaded beside its target."""
    return drafter_for(load_drafter(save_random_drafter(directory, config), decoder))


def engine_config(**changes: Any) -> EngineConfig:
    """Defaults but for the memory, which tiny models hardly need, and K drafts whatever the clock
    says."""
    return EngineConfig(**{"kv_cache_memory": 1 << 22, "draft_length": "fixed", **changes})


@contextmanager
def nan_row(embedding: Tensor, token: int) -> Iterator[None]:
    """Whoever meets the token gets NaN logits."""
    kept = embedding[token].clone()
    with torch.no_grad():
        embedding[token] = float("nan")
    try:
        yield
    finally:
        with torch.no_grad():
            embedding[token] = kept


def hold(table: RequestTable, row: int, blocks: Sequence[int], first: int = 0) -> None:
    """Let a request have some blocks, from its block `first` on."""
    updates = (BlockUpdate(WHOLE, row, first + i, block) for i, block in enumerate(blocks))
    table.update(Step(0, blocks=tuple(updates)))


def kv_cache(table: RequestTable, layers: int, slots: int) -> KVCache:
    """A cache of layers with `ATTENTION`, full of noise."""
    spec = DecoderSpec(VOCAB, 64, layers=layers * (DRAFT_LAYER,))
    cache = KVCache(spec, table, slots, torch.float32)
    cache.tensor.normal_()
    return cache


def memory_of(target_cache: KVCache, network_cache: KVCache | None = None) -> Any:
    """What `DeviceModels` has of a `RequestMemory`, without recurrent layers."""
    return SimpleNamespace(target_cache=target_cache, network_cache=network_cache, states=None)


def on_device(wanted: bool) -> AbstractContextManager[Any]:
    """Engines made within run, on request, the cycle that a GPU captures, here uncaptured."""
    return mock.patch.object(worker, "captures_cycles", return_value=wanted)


def engine(
    target: Decoder,
    proposer: Proposer | None,
    k: int,
    device: bool,
    config: EngineConfig,
) -> Engine:
    """An engine, `on_device` on request."""
    with on_device(device):
        return Engine(target, proposer, k, config)


class MostRepeats(Repeats):
    """Cycles without drafts are repeated as often as they may be."""

    @property
    def wanted(self) -> int:
        return MOST_REPEATS


class GivenLengths:
    """In `DraftLength`'s place: lengths in a given order, again and again."""

    stopped = None

    def __init__(self, lengths: Sequence[int]) -> None:
        self._given = itertools.cycle(lengths)
        self._next = next(self._given)

    def begun(self) -> None:
        """Tries nothing."""

    def choose(self, requests: int, followed: int, branch: bool = True) -> int:
        return self._next

    def launched(self, requests: int, followed: int, drafts: int, branch: bool = True) -> None:
        self._next = next(self._given)

    def pays(self, requests: int) -> bool:
        return True

    def verified(self, cycle: object, branched: bool = False) -> None:
        """Learns nothing."""

    def took(self, time: object) -> None:
        """Learns nothing."""


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[Request]:
    """Run prompts to their ends together; afterwards the pool must be whole again."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [
        engine.add(f"r{i}", prompt, how)
        for i, (prompt, how) in enumerate(zip(prompts, each, strict=True))
    ]
    finish(engine)
    return requests


def save_answers(path: Path, target: Decoder) -> Path:
    """Training data: a target's own greedy continuations, none with the mask token."""
    prompts = [[(7 * i + j * j) % MASK for j in range(6)] for i in range(64)]
    how = SamplingParams(max_tokens=42, logit_bias={MASK: -100.0})
    requests = run(Engine(target, None, 0, engine_config()), prompts, how)
    lines = (
        json.dumps({"prompt_token_ids": prompt, "token_ids": request.output})
        for prompt, request in zip(prompts, requests, strict=True)
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def finish(engine: Engine) -> None:
    """Step until no request is left; then every block must be free."""
    for _ in range(10_000):
        if not engine.busy:
            break
        step(engine)
    assert not engine.busy, "the engine makes no progress"
    check_blocks(engine.blocks)
    assert sum(engine.blocks.free_by_group()) == engine.blocks.num_blocks


def step(engine: Engine) -> list[RequestOutput]:
    """One step, whose outputs are noted in their requests."""
    requests = {**engine.scheduler.requests}
    outputs = engine.step()
    told = {output.request_id for output in outputs}
    assert len(told) == len(outputs), "a step has one result for a request"
    for output in outputs:
        note(requests[output.request_id], output)
    return outputs


def note(request: Request, output: RequestOutput) -> None:
    """Add to a request what a step told of it, as whoever asked for it does: `speculation` and
    `logprobs`."""
    told = vars(request)
    did = told.setdefault("speculation", Speculation([0] * request.k))
    told.setdefault("logprobs", []).extend(output.logprobs)
    if output.cycle:
        repeats = max(len(output.new_tokens), 1)
        did.record(output.drafted, output.verified, repeats)


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of each request."""
    return [request.output for request in requests]


@dataclass(frozen=True)
class Proposal:
    """What a drafter proposes after a prefix, and the logits behind it."""

    drafts: list[int]
    logits: Tensor
    """[k, draft_vocab]"""


@torch.no_grad()
def propose(drafter: Drafter, target: Decoder, tokens: Sequence[int], k: int) -> Proposal:
    """K drafts after some tokens, nothing cached before, through the engine's own memory."""
    model, known = drafter.model, len(tokens) - 1
    table = RequestTable(1, 64, 8, CPU)
    hold(table, 0, [3, 1, 0, 2, 5, 4, 7, 6])
    network = HostNetwork(model, KVCache(model.config.transformer, table, 64, torch.float32))
    _, features = run_target(target, tokens, model.config.taps)
    assert features is not None
    following = torch.tensor(tokens[1:])
    rows = KnownRows((Span(0, 0, known),), following, model.project(features[:known]))
    seen: list[Tensor] = []
    head = model.readout.head
    original = residual.linear

    def linear(x: Normed, layer: Linear) -> Tensor:
        found = original(x, layer)
        seen.extend([found] * (layer is head))
        return found

    with mock.patch.object(residual, "linear", linear):
        draft = drafter.propose(HostProposerRows(k, 0, None, network, rows, None))
    return Proposal(draft.tokens[0].tolist(), torch.cat(seen))
