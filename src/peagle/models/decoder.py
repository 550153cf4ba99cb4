"""The causal transformer: architecture only. Attention and its KV memory are the caller's."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from peagle.models.ends import Ends
from peagle.models.spec import (
    AttentionSpec,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    MixtureSpec,
    MLPSpec,
    SandwichSpec,
    SharedExpertsSpec,
)
from peagle.ops.cached_attention import QKV, AttentionHeads
from peagle.ops.delta_net import DeltaHeads, DeltaWeights
from peagle.ops.linear import Linear
from peagle.ops.moe import Experts, RoutedExperts, ScaledExperts
from peagle.ops.norm import HeadNorm, RMSNorm, normalized
from peagle.ops.packing import LeanModule
from peagle.ops.products.product import Epilogue
from peagle.ops.rope import RopeConfig, Rotation, apply_rope, query_scales, rope_table, rotation_at
from peagle.ops.rows import take
from peagle.ops.sandwich import Mixture
from peagle.ops.swiglu import GATES

Recur = Callable[[int, Tensor, Tensor, DeltaWeights], Tensor]
"""(layer, product [rows, channels + value_width], gates [rows, 2 * value heads], the recurrence's
weights) -> [rows, value_width]."""
Attend = Callable[[int, QKV, AttentionHeads], Tensor]
"""(layer, what its rows attend with, what they see) -> like the queries."""


class Attention(LeanModule):
    """Grouped-query attention with rotary positions; q, k and v come from one product."""

    def __init__(
        self, spec: AttentionSpec, hidden_size: int, eps: float, in_features: int | None = None
    ) -> None:
        """in_features: width of what q, k and v are made of; None: hidden_size."""
        super().__init__()
        self.spec, self.eps = spec, eps
        gates = spec.width if spec.gated else 0
        width = spec.width + 2 * spec.kv_width + gates
        self.qkv = Linear(in_features or hidden_size, width, spec.bias)
        self.out = Linear(spec.width, hidden_size, spec.out_bias)
        norm = HeadNorm(spec.num_heads, spec.num_kv_heads, spec.head_dim, eps)
        self.qk_norm = norm if spec.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(spec.num_heads)) if spec.sinks else None
        both = spec.num_heads + spec.num_kv_heads
        self._parts = (both, spec.num_kv_heads, *((spec.num_heads,) if spec.gated else ()))
        sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._heads = AttentionHeads(*sizes, spec.window, scale=spec.scale, causal=spec.causal)
        self.batch_invariant = False

    def set_kv_scales(self, scales: tuple[float, float]) -> None:
        """The units of keys and values in a cache of a narrower type."""
        self._heads = replace(self._heads, kv_scales=scales)

    @property
    def heads(self) -> AttentionHeads:
        """What attention over these heads has to know."""
        if self.sinks is None and not self.batch_invariant:
            return self._heads
        return replace(self._heads, sinks=self.sinks, batch_invariant=self.batch_invariant)

    def forward(
        self, x: Tensor, rotation: Rotation, layer: int, attend: Attend, kept: Tensor | None = None
    ) -> Tensor:
        """x: [rows, in_features]; result: [rows, hidden_size], or of the rows in `kept` alone."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = self.qkv(x).unflatten(-1, (-1, self.spec.head_dim))
        qk, value, *gate = qkv.split_with_sizes(self._parts, dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if self.spec.v_norm:
            value = normalized(value, self.eps)
        qk = apply_rope(qk, rotation)
        query, key = qk.split_with_sizes((heads, kv_heads), dim=1)
        if rotation.query_scale is not None:
            query = query * rotation.query_scale
        attended = take(attend(layer, QKV(query, key, value), self.heads), kept)
        if self.spec.gated:
            attended = attended * take(gate[0], kept).sigmoid()
        return self.out(attended.flatten(1))


class DeltaNet(LeanModule):
    """A gated delta net: the products around its recurrence; q, k, v and the output's gates come
    from one of them, the recurrence's gates from another."""

    def __init__(self, heads: DeltaHeads, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.heads, self.eps = heads, eps
        self.qkvz = Linear(hidden_size, heads.width)
        self.gates = Linear(hidden_size, 2 * heads.num_value_heads)
        self.conv = nn.Parameter(torch.empty(heads.channels, 1, heads.conv_width))
        self.decay = nn.Parameter(torch.empty(heads.num_value_heads))
        self.decay_bias = nn.Parameter(torch.empty(heads.num_value_heads))
        self.norm = nn.Parameter(torch.ones(heads.value_dim))
        self.out = Linear(heads.value_width, hidden_size)

    @property
    def weights(self) -> DeltaWeights:
        """What the recurrence itself has to know."""
        return DeltaWeights(
            self.heads, self.conv[:, 0], self.decay, self.decay_bias, self.norm, self.eps
        )

    def forward(self, x: Tensor, layer: int, recur: Recur) -> Tensor:
        """x: [rows, hidden_size], like the result."""
        return self.out(recur(layer, self.qkvz(x), self.gates(x), self.weights))


class MLP(LeanModule):
    """A gated MLP; gate and up come from one product."""

    def __init__(self, spec: MLPSpec, hidden_size: int) -> None:
        super().__init__()
        self.gate = Epilogue.GATE if spec.activation == "silu" else Epilogue.GELU_GATE
        self.gate_up = Linear(hidden_size, 2 * spec.intermediate_size, spec.bias)
        self.down = Linear(spec.intermediate_size, hidden_size, spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(GATES[self.gate](self.gate_up(x)))


class SharedExperts(LeanModule):
    """Experts, and beside them an MLP for every row, whose result is multiplied by a gate."""

    def __init__(self, spec: SharedExpertsSpec, hidden_size: int) -> None:
        super().__init__()
        experts = feed_forward(spec.experts, hidden_size)
        assert isinstance(experts, Experts)
        self.experts = experts
        self.shared = MLP(spec.mlp, hidden_size)
        self.shared_gate = Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x) + self.shared(x) * self.shared_gate(x).sigmoid()


def feed_forward(spec: FeedForwardSpec, hidden_size: int) -> MLP | Experts | SharedExperts:
    """A layer's MLP, or its experts: [rows, hidden_size] -> the same; of both in a sandwich, the
    MLP."""
    if isinstance(spec, SharedExpertsSpec):
        return SharedExperts(spec, hidden_size)
    if isinstance(spec, MixtureSpec):
        spec = spec.mlp
    if isinstance(spec, MLPSpec):
        return MLP(spec, hidden_size)
    sizes = spec.moe_intermediate_size, spec.num_experts, spec.num_experts_per_tok
    return Experts(hidden_size, *sizes, spec.norm_topk_prob, spec.swiglu_limit)


class DecoderLayer(nn.Module):
    """A pre-norm block on the residual stream [rows, hidden_size]."""

    def __init__(self, spec: LayerSpec, hidden_size: int) -> None:
        super().__init__()
        eps = spec.norms.eps
        self.input_norm = RMSNorm(hidden_size, eps)
        if isinstance(spec.mixer, DeltaHeads):
            self.delta_net = DeltaNet(spec.mixer, hidden_size, eps)
        else:
            self.attention = Attention(spec.mixer, hidden_size, eps)
        self.post_norm = RMSNorm(hidden_size, eps)
        self.mlp = feed_forward(spec.feed_forward, hidden_size)

    @property
    def mixer(self) -> Attention | DeltaNet:
        """What mixes positions."""
        return self.attention

    def forward(
        self, x: Tensor, rotation: Rotation, layer: int, attend: Attend, kept: Tensor | None = None
    ) -> Tensor:
        """kept: the rows that continue after attention, without repeats; None: all."""
        mixed = self.attention(self.input_norm(x), rotation, layer, attend, kept)
        return self.after_mixer(take(x, kept), mixed)

    def after_mixer(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream after the block, given what its mixer adds; both like the stream."""
        x = x + mixed
        return x + self.mlp(self.post_norm(x))


class SandwichLayer(DecoderLayer):
    """A block that also norms what it adds, and may scale the stream by a number of its own."""

    def __init__(self, spec: LayerSpec, hidden_size: int) -> None:
        super().__init__(spec, hidden_size)
        norms = spec.norms
        assert isinstance(norms, SandwichSpec)
        eps = norms.eps if norms.added_eps is None else norms.added_eps
        self.attention_norm = RMSNorm(hidden_size, eps)
        self.mlp_norm = RMSNorm(hidden_size, eps)
        self.scalar = nn.Parameter(torch.ones(1)) if norms.scaled else None

    def after_mixer(self, x: Tensor, mixed: Tensor) -> Tensor:
        """As `DecoderLayer`."""
        x = x + self.attention_norm(mixed)
        x = x + self.mlp_norm(self.fed(x))
        return x if self.scalar is None else x * self.scalar

    def fed(self, x: Tensor) -> Tensor:
        """What the stream's rows [rows, hidden_size] get from the MLP."""
        return self.mlp(self.post_norm(x))


class MixtureLayer(SandwichLayer):
    """The same with experts beside the MLP, each side normed before and after by itself."""

    def __init__(self, spec: LayerSpec, hidden_size: int) -> None:
        super().__init__(spec, hidden_size)
        experts, self.eps = spec.experts, spec.norms.eps
        assert experts is not None
        sizes = experts.moe_intermediate_size, experts.num_experts, experts.num_experts_per_tok
        self.experts = ScaledExperts(hidden_size, *sizes)
        self.dense_norm = RMSNorm(hidden_size, self.eps)
        self.experts_input_norm = RMSNorm(hidden_size, self.eps)
        self.experts_norm = RMSNorm(hidden_size, self.eps)

    def mixture(self) -> Mixture:
        """What follows attention, but for the MLP and its norm."""
        norms = self.experts_input_norm, self.dense_norm, self.experts_norm, self.mlp_norm
        assert self.scalar is not None
        return Mixture(self.experts, *norms, self.scalar)

    def fed(self, x: Tensor) -> Tensor:
        """What the stream's rows [rows, hidden_size] get from MLP and experts."""
        mixed = self.experts(self.experts_input_norm(x), normalized(x, self.eps))
        return self.dense_norm(super().fed(x)) + self.experts_norm(mixed)


class RecurrentLayer(DecoderLayer):
    """A pre-norm block whose positions are mixed by a recurrence."""

    @property
    def mixer(self) -> Attention | DeltaNet:
        """What mixes positions."""
        return self.delta_net

    def recurred(self, x: Tensor, layer: int, recur: Recur) -> Tensor:
        """The residual stream after the block, both [rows, hidden_size]."""
        return self.after_mixer(x, self.delta_net(self.input_norm(x), layer, recur))


def decoder_layer(spec: LayerSpec, hidden_size: int) -> DecoderLayer:
    """The block that a layer is."""
    if isinstance(spec.mixer, DeltaHeads):
        return RecurrentLayer(spec, hidden_size)
    if not isinstance(spec.norms, SandwichSpec):
        return DecoderLayer(spec, hidden_size)
    mixture = isinstance(spec.feed_forward, MixtureSpec)
    return (MixtureLayer if mixture else SandwichLayer)(spec, hidden_size)


class RopeTables(nn.Module):
    """The rotations of every position, one table for all layers that rotate alike; a recurrence has
    none."""

    def __init__(self, layers: Mapping[int, AttentionSpec], length: int) -> None:
        """layers: those that attend, by their place."""
        super().__init__()
        names: dict[tuple[RopeConfig, int], str] = {}
        self._of_layers: dict[int, str] = {}
        for layer, heads in layers.items():
            key = heads.rope, heads.head_dim
            if key not in names:
                names[key] = f"table{len(names)}"
                self.register_buffer(names[key], rope_table(*key, length), persistent=False)
                scales = query_scales(heads.rope, length)
                self.register_buffer(f"{names[key]}_scales", scales, persistent=False)
            self._of_layers[layer] = names[key]

    def of_layers(self) -> dict[int, tuple[Tensor, Tensor | None]]:
        """By layer, [positions, 2, width] of `rope_table`, and [positions] of `query_scales`."""
        return {layer: self._tables(name) for layer, name in self._of_layers.items()}

    def forward(self, positions: Tensor) -> dict[int, Rotation]:
        """By layer, the rotations at some positions [rows]."""
        found: dict[str, Rotation] = {}
        for name in dict.fromkeys(self._of_layers.values()):
            table, scales = self._tables(name)
            found[name] = rotation_at(table, positions, scales)
        return {layer: found[name] for layer, name in self._of_layers.items()}

    def _tables(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self.get_buffer(name), getattr(self, f"{name}_scales")


class Decoder(Ends):
    """A target that also returns the hidden states that drafters read."""

    def __init__(self, spec: DecoderSpec, max_length: int | None = None) -> None:
        super().__init__(spec, max_length)
        self.layers = nn.ModuleList(decoder_layer(each, spec.hidden_size) for each in spec.layers)
        self.norm = RMSNorm(spec.hidden_size, spec.norm.eps)
        self.rope = RopeTables(spec.attention, self.max_length)
        factor = spec.embedding_scale
        scale = None if factor is None else torch.tensor(factor, device="cpu")
        self.register_buffer("embedding_scale", scale, persistent=False)

    embedding_scale: Tensor | None

    def make_batch_invariant(self) -> None:
        """On a GPU, let no row's results depend on what other rows a pass has: slower."""
        self.batch_invariant = True
        for module in self.modules():
            if isinstance(module, Linear | RoutedExperts | Attention):
                module.batch_invariant = True

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        taps: tuple[int, ...] = (),
        recur: Recur | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run rows of tokens through the stack.

        tokens, positions: [rows]; recur: the recurrences of a pass, where layers have any. Returns
        `logits` takes, and the tapped residual streams side by side
        [rows, len(taps) * hidden_size]: tap i is the stream after i layers.
        """
        rotations = self.rope(positions)
        x = self.scaled(self.embed(tokens))
        tapped = [self.tap(x)] if 0 in taps else []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentLayer):
                assert recur is not None, "a pass over recurrent layers brings their states"
                x = layer.recurred(x, index, recur)
            else:
                x = layer(x, rotations[index], index, attend)
            if index + 1 in taps:
                tapped.append(self.tap(x))
        return self.norm(x), torch.cat(tapped, dim=-1) if taps else None

    def scaled(self, embedded: Tensor) -> Tensor:
        """The stream that embeddings [rows, hidden_size] begin."""
        if self.spec.embedding_norm:
            embedded = normalized(embedded, self.spec.norm.eps)
        return embedded if self.embedding_scale is None else embedded * self.embedding_scale

    @property
    def begins_plainly(self) -> bool:
        """Whether embeddings are the stream's beginning as they are."""
        return self.embedding_scale is None and not self.spec.embedding_norm

    def tap(self, stream: Tensor) -> Tensor:
        """What drafters read of the stream, in the same shape."""
        multiplier = self.spec.residual_multiplier
        return stream if multiplier == 1 else stream * multiplier
