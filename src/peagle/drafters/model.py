"""The network P-EAGLE and EAGLE-3 share: token embeddings and target features in, logits out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from peagle.drafters.kind import EAGLE3, PEAGLE, Kind
from peagle.drafters.readout import Readout
from peagle.drafters.selector import Selector, SelectorConfig
from peagle.models.decoder import MLP, Attend, Attention, DecoderLayer, Embedding
from peagle.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec
from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.rope import NOPE, RopeConfig, Rotation, rope_table, rotation_at
from peagle.ops.rows import take

LayerCall = Callable[..., Tensor]
"""(layer, its arguments) -> its result: training compiles or recomputes layers."""


def call_plainly(layer: nn.Module, *arguments: Any) -> Tensor:
    """The layer's own forward."""
    result: Tensor = layer(*arguments)
    return result


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The tapped layers if a directory names none: 2, N // 2, N - 3."""
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


WHOLE_HEAD = 128
"""Width of a drafter's heads where the target's would not do."""


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's architecture and what it was trained for; keys as in vLLM's `config.json`."""

    transformer: DecoderSpec
    """The draft layers, alike but for their windows; vocab_size is the target's."""
    target_hidden_size: int
    taps: tuple[int, ...]
    """Target layers whose inputs are features (`eagle_aux_hidden_state_layer_ids`), ascending."""
    draft_vocab_size: int
    taps_named: bool = True
    """Whether the directory names the taps; else they are vLLM's default."""
    mask_token_id: int | None = None
    """The mask slots' token; None for EAGLE-3, which has no mask slots."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    trained_tokens: int | None = None
    """K that the drafter was trained for, if the directory says."""
    selector: SelectorConfig | None = None
    """What corrects drafts by the draft before, from the directory's `correction`."""

    @property
    def layer(self) -> LayerSpec:
        """What every draft layer is but for its window; the first one's attention reads twice the
        width."""
        return self.transformer.layers[0]

    @property
    def attention(self) -> AttentionSpec:
        """Its attention, whose window is the first layer's."""
        return self.transformer.attention[0]

    @property
    def mlp(self) -> MLPSpec:
        """Its MLP: no drafter has experts."""
        assert isinstance(self.layer.feed_forward, MLPSpec)
        return self.layer.feed_forward

    @property
    def kind(self) -> Kind:
        """The kind of drafter: with a mask token, there are mask slots."""
        return EAGLE3 if self.mask_token_id is None else PEAGLE

    @property
    def default_k(self) -> int:
        """K if the user gives none: the trained one, else its kind's."""
        return self.trained_tokens or self.kind.default_k

    @property
    def feature_size(self) -> int:
        """Width of a target feature before `fc`."""
        return len(self.taps) * self.target_hidden_size

    def new_selector(self) -> Selector | None:
        """A selector of its sizes, without values; None where it has none."""
        if self.selector is None:
            return None
        shape = self.transformer
        return Selector(self.selector, shape.hidden_size, shape.vocab_size, self.draft_vocab_size)

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size != self.transformer.vocab_size


def heads_like(target: DecoderSpec) -> AttentionSpec:
    """A new drafter's heads: those of the target's first attention, without what is its own.

    Drafters' heads turn whole, so those of a target that turns a part of each are as many as are
    128 wide together.
    """
    like = next(iter(target.attention.values()))
    sizes = like.num_heads, like.num_kv_heads, like.head_dim
    if like.rope.width(like.head_dim) < like.head_dim:
        parts = max(like.head_dim // WHOLE_HEAD, 1)
        sizes = parts * like.num_heads, parts * like.num_kv_heads, like.head_dim // parts
    return AttentionSpec(*sizes, _rotation(target), qk_norm=like.qk_norm)


def _rotation(target: DecoderSpec) -> RopeConfig:
    """That of the target's first layer that rotates, if it is one that vLLM's drafters have; else
    plain rope of its base."""
    ropes = (heads.rope for heads in target.attention.values())
    rope = next((each for each in ropes if each != NOPE), RopeConfig())
    if rope.kind in ("longrope", "proportional") or rope.partial_rotary_factor != 1:
        return RopeConfig(rope.theta, original_max_position=target.max_length)
    return replace(rope, llama_4_scaling_beta=0.0)


class FirstLayer(nn.Module):
    """Layer 0: attends over [normed embedding ; normed feature], adds to the feature's stream."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden_size, eps = config.transformer.hidden_size, config.layer.norms.eps
        self.input_norm = RMSNorm(hidden_size, eps)
        self.hidden_norm = RMSNorm(hidden_size, eps)
        self.attention = Attention(config.attention, hidden_size, eps, 2 * hidden_size)
        self.post_norm = RMSNorm(hidden_size, eps)
        self.mlp = MLP(config.mlp, hidden_size)
        self.norm_before_residual = config.norm_before_residual

    @property
    def mixer(self) -> Attention:
        """What mixes positions."""
        return self.attention

    def forward(
        self,
        embedding: Tensor,
        feature: Tensor,
        rotation: Rotation,
        attend: Attend,
        kept: Tensor | None = None,
    ) -> Tensor:
        """embedding, feature: [rows, hidden_size]. Returns the residual stream, in the same shape,
        or that of the rows in `kept` alone."""
        normed = self.hidden_norm(feature)
        x = torch.cat((self.input_norm(embedding), normed), dim=-1)
        residual = normed if self.norm_before_residual else feature
        x = take(residual, kept) + self.attention(x, rotation, 0, attend, kept)
        return x + self.mlp(self.post_norm(x))


class DraftModel(nn.Module):
    """Draft layers over (embedding of x_{p+1}, feature of p) at position p."""

    def __init__(self, config: DrafterConfig, max_length: int) -> None:
        super().__init__()
        shape, eps = config.transformer, config.transformer.norm.eps
        self.config = config
        self.embed = Embedding(shape.vocab_size, shape.hidden_size)
        if config.norm_before_fc:
            self.feature_norm = RMSNorm(config.feature_size, eps)
        if config.fc_norm:
            norms = (RMSNorm(config.target_hidden_size, eps) for _ in config.taps)
            self.tap_norms = nn.ModuleList(norms)
        self.fc = Linear(config.feature_size, shape.hidden_size)
        self.first = FirstLayer(config)
        self.rest = nn.ModuleList(DecoderLayer(s, shape.hidden_size) for s in shape.layers[1:])
        self.readout = Readout(shape, config.draft_vocab_size, config.new_selector())
        if config.kind is PEAGLE:
            self.mask_hidden = nn.Parameter(torch.empty(config.feature_size))
        attention = config.attention
        table = rope_table(attention.rope, attention.head_dim, max_length)
        self.register_buffer("rotations", table, persistent=False)

    rotations: Tensor

    def project(self, features: Tensor) -> Tensor:
        """Tapped hidden states [rows, feature_size] -> features [rows, hidden_size]."""
        if self.config.norm_before_fc:
            features = self.feature_norm(features)
        if self.config.fc_norm:
            chunks = features.chunk(len(self.config.taps), dim=-1)
            normed = (norm(chunk) for norm, chunk in zip(self.tap_norms, chunks, strict=True))
            features = torch.cat(tuple(normed), dim=-1)
        projected: Tensor = self.fc(features)
        return projected

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Run rows through the draft layers.

        tokens, positions: [rows]; features: projected, [rows, hidden_size]. Returns the residual
        stream [rows, hidden_size] before the final norm.
        """
        return self.layers(self.embed(tokens).to(features.dtype), features, positions, attend)

    def layers(
        self,
        embeddings: Tensor,
        features: Tensor,
        positions: Tensor,
        attend: Attend,
        call: LayerCall = call_plainly,
        kept: Tensor | None = None,
    ) -> Tensor:
        """The draft layers alone. Inputs as in `forward`, embeddings in place of tokens.

        Embeddings and features may be a single row, [1, hidden_size], for all positions.
        kept: the rows to return, without repeats; the others are only attended to. None: all.
        """
        rotation, last = rotation_at(self.rotations, positions), len(self.rest)
        x = call(self.first, embeddings, features, rotation, attend, None if last else kept)
        for index, layer in enumerate(self.rest, start=1):
            x = call(layer, x, rotation, index, attend, kept if index == last else None)
        return x

    def mask_feature(self) -> Tensor:
        """Projected feature of every mask slot: [1, hidden_size]; P-EAGLE only."""
        return self.project(self.mask_hidden[None])

    def feedback(self, hidden: Tensor) -> Tensor:
        """EAGLE-3's feature for its next slot: its own output, normed if it was trained so."""
        return self.readout.norm(hidden) if self.config.norm_output else hidden
