"""What a decoder is: a list of layer specs. Families write them, everything else reads them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from peagle.ops.delta_net import DeltaHeads
from peagle.ops.rope import RopeConfig


@dataclass(frozen=True)
class AttentionSpec:
    """A layer's attention: its heads, how they are normed and rotated, which positions they see."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    window: int | None = None
    """Positions that a row sees, its own included; None: all up to its own."""
    sinks: bool = False
    """Whether every head learns a logit that takes a share of its attention and adds no value."""
    qk_norm: bool = False
    """Whether queries and keys are normed, head by head, before rotation."""
    v_norm: bool = False
    """Whether values are normed as well, without a weight."""
    k_eq_v: bool = False
    """Whether values are what keys are before norm and rotation: one projection gives both."""
    scale: float | None = None
    """What scores are multiplied by; None: head_dim ** -0.5."""
    bias: bool = False
    """Whether q, k and v have biases."""
    out_bias: bool = False
    """Whether the output projection has a bias."""
    gated: bool = False
    """Whether what a head gives is multiplied by the sigmoid of a gate, which is as wide."""
    causal: bool = True
    """Whether rows see none behind them; else they see all of their request in a pass."""

    @property
    def full(self) -> bool:
        """Whether this is plain causal attention, without a window or sinks."""
        return self.window is None and not self.sinks and self.causal

    @property
    def width(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys of a position, and of all its values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class MLPSpec:
    """A dense gated MLP."""

    intermediate_size: int
    bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """The gate's function; with silu this is SwiGLU. gelu_tanh: GELU as tanh approximates it."""

    @property
    def width(self) -> int:
        """Inner numbers that one row takes."""
        return self.intermediate_size


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts, of which the router chooses some for every row."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    """Inner width of one expert."""
    intermediate_size: int
    """Inner width that a dense MLP of the same model has, or would have."""
    norm_topk_prob: bool = False
    """Whether the weights of the chosen experts are made to sum to 1."""
    swiglu_limit: float | None = None
    """GPT-OSS's upper bound of the gate (up is bounded on both sides), whose products have biases;
    None: SwiGLU without them, or in a `MixtureSpec` GELU as tanh approximates it."""

    @property
    def width(self) -> int:
        """As in `MLPSpec`."""
        return max(self.intermediate_size, self.moe_intermediate_size * self.num_experts_per_tok)


@dataclass(frozen=True)
class MixtureSpec:
    """An MLP and experts side by side, each normed by itself, as in Gemma 4."""

    mlp: MLPSpec
    experts: ExpertsSpec

    @property
    def intermediate_size(self) -> int:
        """The MLP's inner width."""
        return self.mlp.intermediate_size

    @property
    def width(self) -> int:
        """As in `MLPSpec`."""
        return max(self.mlp.width, self.experts.width)


class SharedExpertsSpec(MixtureSpec):
    """Experts, and an MLP beside them whose result every row gets, times a gate: Qwen3.5's."""


FeedForwardSpec = MLPSpec | ExpertsSpec | MixtureSpec


@dataclass(frozen=True)
class NormSpec:
    """RMS norms, one before the mixer and one before the feed-forward."""

    eps: float = 1e-6
    offset: float = 0.0
    """What is added to stored weights, in float32, before anything is multiplied by them."""


@dataclass(frozen=True)
class SandwichSpec(NormSpec):
    """Norms of what mixer and feed-forward give, too, before it is added: four in all."""

    added_eps: float | None = None
    """The eps of these; None: that of the others."""
    scaled: bool = False
    """Whether a learned number multiplies the stream after both: Gemma 4's block."""


@dataclass(frozen=True)
class LayerSpec:
    """One block: a mixer of positions, then a feed-forward of each position by itself."""

    mixer: AttentionSpec | DeltaHeads
    """Attention, or a recurrence: a gated delta net."""
    feed_forward: FeedForwardSpec
    norms: NormSpec = NormSpec()

    @property
    def width(self) -> int:
        """Inner numbers that one row takes."""
        return max(self.mixer.width, self.feed_forward.width)

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer

    @property
    def experts(self) -> ExpertsSpec | None:
        """The layer's experts, alone or beside an MLP."""
        match self.feed_forward:
            case MixtureSpec(experts=experts) | (ExpertsSpec() as experts):
                return experts
        return None


@dataclass(frozen=True)
class DecoderSpec:
    """A causal transformer: token embeddings, layers, a final norm and a head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec = NormSpec()
    max_length: int = 2048
    """Longest context, in tokens."""
    tie_word_embeddings: bool = False
    embedding_scale: float | None = None
    """What token embeddings are multiplied by to begin the stream, rounded to their type first;
    None: nothing. Drafters read them without it."""
    embedding_norm: bool = False
    """Whether token embeddings are normed, without a weight, to begin the stream. Drafters read
    them as they are."""
    logit_softcap: float | None = None
    """Bound c of the logits, c * tanh(logits / c); None: none."""
    logit_scale: float = 1.0
    """What logits are multiplied by; the final norm's weight takes it when it is loaded."""
    residual_multiplier: float = 1.0
    """What a family multiplies all by that its layers add. The stream is kept divided by it, which
    no norm sees: `embedding_scale` and the norms' eps say it already, and taps are multiplied."""

    @cached_property
    def attention(self) -> dict[int, AttentionSpec]:
        """The layers that attend, by their place among all."""
        each = ((index, layer.mixer) for index, layer in enumerate(self.layers))
        return {index: heads for index, heads in each if isinstance(heads, AttentionSpec)}

    @cached_property
    def recurrent(self) -> dict[int, DeltaHeads]:
        """The layers that are recurrences, likewise."""
        each = ((index, layer.mixer) for index, layer in enumerate(self.layers))
        return {index: heads for index, heads in each if isinstance(heads, DeltaHeads)}
