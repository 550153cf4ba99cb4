"""What a drafter's network is to the engine: features of known tokens in, drafts' streams out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from peagle.drafters.kind import Kind
from peagle.drafters.readout import Readout
from peagle.drafters.selector import Selector, SelectorConfig
from peagle.models.decoder import Attend
from peagle.models.ends import Embedding
from peagle.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec
from peagle.ops.cycle_state import FirstNorms
from peagle.ops.linear import Linear
from peagle.ops.products.normed import Normed
from peagle.ops.rope import rope_table


@dataclass(frozen=True)
class NetworkConfig(ABC):
    """Sizes of a network, and what it reads of its target."""

    transformer: DecoderSpec
    """The draft layers; vocab_size is the target's."""
    target_hidden_size: int
    taps: tuple[int, ...]
    """Target layers whose inputs are features, ascending; one past the last: its output."""
    draft_vocab_size: int
    mask_token_id: int | None = field(default=None, kw_only=True)
    """The mask slots' token; None where a network has no mask slots."""
    selector: SelectorConfig | None = field(default=None, kw_only=True)
    """What corrects drafts by the draft before; None: they stay as they are."""
    trained_tokens: int | None = field(default=None, kw_only=True)
    """K that the network was trained for, if its files say."""

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """The kind of drafter."""

    @property
    def default_k(self) -> int:
        """K if the user gives none: the trained one, else its kind's."""
        return self.trained_tokens or self.kind.default_k

    @property
    def most_tokens(self) -> int | None:
        """The largest K that the network can draft; None: any."""
        return None

    @property
    def feature_size(self) -> int:
        """Width of a target feature before it is projected."""
        return len(self.taps) * self.target_hidden_size

    @property
    def layer(self) -> LayerSpec:
        """What every draft layer is, except for its window; the first layer's attention may read
        twice the width."""
        return self.transformer.layers[0]

    @property
    def attention(self) -> AttentionSpec:
        """The attention of a draft layer, with the first layer's window."""
        return self.transformer.attention[0]

    @property
    def mlp(self) -> MLPSpec:
        """The MLP of a draft layer: only a target's own head may have experts."""
        assert isinstance(self.layer.feed_forward, MLPSpec)
        return self.layer.feed_forward

    def rotations(self, length: int) -> Tensor:
        """Those of so many positions: [length, 2, width]."""
        return rope_table(self.attention.rope, self.attention.head_dim, length)

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether draft ids differ from target ids."""
        return self.draft_vocab_size != self.transformer.vocab_size

    def new_selector(self) -> Selector | None:
        """A selector of the network's sizes, without values; None where it has none."""
        if self.selector is None:
            return None
        shape = self.transformer
        return Selector(self.selector, shape.hidden_size, shape.vocab_size, self.draft_vocab_size)


class Network(nn.Module, ABC):
    """Draft layers over (embedding of x_{p+1}, feature of p) at position p."""

    config: NetworkConfig
    embed: Embedding
    fc: Linear
    """What the layers read, of features alone or of embeddings beside features."""
    readout: Readout
    rotations: Tensor
    """[positions, 2, width] of `rope_table`."""
    unread = 0
    """How many rows, from a request's newest known one on, come before the first that drafts."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[Any]:
        """The draft layers."""

    @abstractmethod
    def first_norms(self) -> FirstNorms:
        """What comes before the first layer."""

    @abstractmethod
    def begin(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Normed]:
        """The first layer's residual stream, and the input of its first product.

        x: [rows, 2 * hidden_size] normed embeddings beside normed features; stream: [rows,
        hidden_size] the features themselves, or what `first_norms` puts in their place.
        """

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """Tapped hidden states [rows, feature_size] -> features [rows, hidden_size]."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Run rows through the draft layers.

        tokens, positions: [rows]; features: projected, [rows, hidden_size]. Returns the residual
        stream [rows, hidden_size] before the final norm.
        """

    def with_slots(
        self, rows: tuple[Tensor, Tensor, Tensor], attend: Attend, slots: Tensor
    ) -> Tensor:
        """`forward` over tokens, features and positions, among which mask slots stand at `slots`
        [requests, masks]."""
        # a mask slot is a row like any other, where layers are causal
        return self(*rows, attend)

    def quantize(self) -> None:
        """Round the products of the draft layers and the head to FP8, a scale for each output: half
        the bytes of each pass, and answers stay as they are.

        Features are projected as before. A head that is the target's becomes one of the drafter's
        own.
        """
        for layer in self.blocks:
            layer.attention.qkv = layer.attention.qkv.quantized()
            layer.attention.out = layer.attention.out.quantized()
            layer.mlp.gate_up = layer.mlp.gate_up.quantized()
            layer.mlp.down = layer.mlp.down.quantized()
        self.readout.head = self.readout.head.quantized()

    def feedback(self, hidden: Tensor) -> Tensor:
        """The features of drafts' rows, made of the streams [rows, hidden_size] that drafted
        them."""
        return hidden
