"""The causal transformer: architecture only. Attention and its KV memory are the caller's."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.ops.cached_attention import AttentionSpec
from peagle.ops.linear import Linear
from peagle.ops.moe import Experts
from peagle.ops.norm import HeadNorm, RMSNorm
from peagle.ops.packing import Part
from peagle.ops.rope import RopeConfig, Rotation, apply_rope, rope_table, rotation_at
from peagle.ops.rows import take
from peagle.ops.swiglu import swiglu

Attend = Callable[..., Tensor]
"""(layer, query [rows, heads, head_dim], key [rows, kv_heads, head_dim], value) -> like query. With
`per_layer_attention` the layer's `AttentionSpec` follows, which plain attention does not take."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder; the names are Hugging Face's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    """Biases on q, k, v and the output projection."""
    attention_sinks: bool = False
    """Every head learns a logit that takes a share of its attention and contributes no value."""
    sliding_window: int | None = None
    """Positions that a row sees in layers of type sliding_attention, its own included."""
    layer_types: tuple[str, ...] = ()
    """sliding_attention or full_attention, by layer; empty where all are full."""
    mlp_bias: bool = False
    num_experts: int = 0
    """Number of experts in place of each layer's MLP; 0: one dense MLP of intermediate_size."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    swiglu_limit: float | None = None
    """If set, experts are GPT-OSS's: with biases, and a SwiGLU clamped to this limit."""

    @property
    def per_layer_attention(self) -> bool:
        """Whether layers may have windows or sinks, so that each call brings an `AttentionSpec`."""
        return self.attention_sinks or bool(self.layer_types)

    def window(self, layer: int) -> int | None:
        """Positions that a layer's rows see, their own included; None: all before them."""
        sliding = self.layer_types and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None


class Embedding(Part):
    """Token embeddings; unlike torch's, not initialised at random when built."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Attention(Part):
    """Grouped-query attention with rotary positions; q, k and v come from one product."""

    def __init__(self, config: DecoderConfig, in_features: int, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width = self.heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        self.qkv = Linear(in_features, width + 2 * kv_width, config.attention_bias)
        self.out = Linear(width, config.hidden_size, config.attention_bias)
        norm = HeadNorm(self.heads, self.kv_heads, self.head_dim, config.rms_norm_eps)
        self.qk_norm = norm if config.qk_norm else None
        self.window, self.per_layer_attention = window, config.per_layer_attention
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if config.attention_sinks else None

    @property
    def spec(self) -> AttentionSpec:
        """What attention over these heads has to know."""
        return AttentionSpec(self.heads, self.kv_heads, self.head_dim, self.window, self.sinks)

    def forward(
        self, x: Tensor, rotation: Rotation, layer: int, attend: Attend, kept: Tensor | None = None
    ) -> Tensor:
        """x: [rows, in_features]; result: [rows, hidden_size], or of the rows in `kept` alone."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        qk, value = qkv.split_with_sizes((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = apply_rope(qk, rotation)
        query, key = qk.split_with_sizes((self.heads, self.kv_heads), dim=1)
        spec = (self.spec,) if self.per_layer_attention else ()
        attended = attend(layer, query, key, value, *spec)
        return self.out(take(attended, kept).flatten(1))


class MLP(Part):
    """SwiGLU; gate and up come from one product."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


def feed_forward(config: DecoderConfig) -> MLP | Experts:
    """A layer's MLP, or its experts: [rows, hidden_size] -> the same."""
    if not config.num_experts:
        return MLP(config)
    return Experts(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        config.swiglu_limit,
    )


class DecoderLayer(nn.Module):
    """A pre-norm block on the residual stream [rows, hidden_size]."""

    def __init__(self, config: DecoderConfig, window: int | None = None) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, config.hidden_size, window)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = feed_forward(config)

    def forward(
        self, x: Tensor, rotation: Rotation, layer: int, attend: Attend, kept: Tensor | None = None
    ) -> Tensor:
        """kept: the rows that continue after attention, without repeats; None: all."""
        x = take(x, kept) + self.attention(self.input_norm(x), rotation, layer, attend, kept)
        return x + self.mlp(self.post_norm(x))


class Decoder(nn.Module):
    """A target that also returns the hidden states that drafters read."""

    def __init__(self, config: DecoderConfig, max_length: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        windows = map(config.window, range(config.num_hidden_layers))
        self.layers = nn.ModuleList(DecoderLayer(config, window) for window in windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight
        length = max_length or config.max_position_embeddings
        table = rope_table(config.rope, config.head_dim, length)
        self.register_buffer("rotations", table, persistent=False)

    rotations: Tensor

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run rows of tokens through the stack.

        tokens, positions: [rows]. Returns the final normed hidden states [rows, hidden_size], which
        `head` turns into logits, and the tapped residual streams side by side
        [rows, len(taps) * hidden_size]: tap i is the stream after i layers.
        """
        rotation = rotation_at(self.rotations, positions)
        x = self.embed(tokens)
        tapped = [x] if 0 in taps else []
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, index, attend)
            if index + 1 in taps:
                tapped.append(x)
        return self.norm(x), torch.cat(tapped, dim=-1) if taps else None
