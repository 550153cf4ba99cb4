"""The network P-EAGLE and EAGLE-3 share: token embeddings and target features in, logits out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from peagle.drafters.kind import EAGLE3, PEAGLE, Kind
from peagle.drafters.network import Network, NetworkConfig
from peagle.drafters.readout import Readout
from peagle.models.decoder import MLP, Attend, Attention, DecoderLayer
from peagle.models.ends import Embedding
from peagle.models.spec import AttentionSpec, DecoderSpec
from peagle.ops.cycle_state import FirstNorms
from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.products.normed import Normed
from peagle.ops.rope import NOPE, RopeConfig, Rotation, rotation_at
from peagle.ops.rows import take

LayerCall = Callable[..., Tensor]
"""(layer, its arguments) -> its result: training compiles or recomputes layers."""


def call_plainly(layer: nn.Module, *arguments: Any) -> Tensor:
    """The layer's own forward."""
    return layer(*arguments)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The tapped layers if a directory names none: 2, N // 2, N - 3."""
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


WHOLE_HEAD = 128
"""Width of a drafter's heads where the target's would not do."""


@dataclass(frozen=True)
class DrafterConfig(NetworkConfig):
    """A drafter's architecture and what it was trained for; keys as in vLLM's `config.json`: its
    taps are `eagle_aux_hidden_state_layer_ids`. The draft layers are alike but for their windows.
    """

    taps_named: bool = True
    """Whether the directory names the taps; else they are vLLM's default."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of drafter: with a mask token, there are mask slots."""
        return EAGLE3 if self.mask_token_id is None else PEAGLE


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


class DraftModel(Network):
    """A drafter with a directory of its own."""

    config: DrafterConfig

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
        self.register_buffer("rotations", config.rotations(max_length), persistent=False)

    @property
    def blocks(self) -> Sequence[Any]:
        """As `Network`."""
        return (self.first, *self.rest)

    def first_norms(self) -> FirstNorms:
        """As `Network`."""
        first, masked = self.first, self.config.kind is PEAGLE
        return FirstNorms(
            embedding=self.embed.weight,
            input_weight=first.input_norm.weight,
            hidden_weight=first.hidden_norm.weight,
            eps=first.input_norm.eps,
            mask_feature=(self.mask_feature() if masked else self.embed.weight)[0].contiguous(),
            mask_token=self.config.mask_token_id or 0,
            before_residual=self.config.norm_before_residual,
        )

    def begin(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Normed]:
        """As `Network`."""
        return stream, Normed(x, None, self.first.input_norm.eps)

    def project(self, features: Tensor) -> Tensor:
        """As `Network`."""
        if self.config.norm_before_fc:
            features = self.feature_norm(features)
        if self.config.fc_norm:
            chunks = features.chunk(len(self.config.taps), dim=-1)
            normed = (norm(chunk) for norm, chunk in zip(self.tap_norms, chunks, strict=True))
            features = torch.cat(tuple(normed), dim=-1)
        return self.fc(features)

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """As `Network`."""
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
        """As `Network`: EAGLE-3's own output, normed if it was trained so."""
        return self.readout.norm(hidden) if self.config.norm_output else hidden
