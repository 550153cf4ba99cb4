"""What most families call their tensors."""

from dataclasses import dataclass

from peagle.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec
from peagle.models.weights import TensorRule

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Place:
    """Where one layer's tensors are: the beginnings of our names and of the file's."""

    ours: str
    theirs: str

    def rule(
        self, name: str, parts: tuple[str, ...], sizes: tuple[int, ...], leading: int = 1
    ) -> TensorRule:
        """As `TensorRule`, of names within the layer."""
        theirs = tuple(f"{self.theirs}.{part}" for part in parts)
        return TensorRule(f"{self.ours}.{name}", theirs, sizes, leading)

    def linear(
        self, name: str, parts: tuple[str, ...], sizes: tuple[int, ...], bias: bool
    ) -> list[TensorRule]:
        """The weight of a product of ours, which is some of the file's together, and its bias."""
        kinds = ("weight", "bias") if bias else ("weight",)
        return [
            self.rule(f"{name}.{kind}", tuple(f"{part}.{kind}" for part in parts), sizes)
            for kind in kinds
        ]


def embeddings(prefix: str) -> str:
    """What the file calls the token embeddings. prefix: how the decoder's names begin."""
    return f"{prefix}.embed_tokens.weight"


def ends(spec: DecoderSpec, prefix: str) -> list[TensorRule]:
    """Embeddings, final norm, and the head unless it is the embeddings. prefix: as above."""
    rules = [
        TensorRule("embed.weight", (embeddings(prefix),), (spec.vocab_size,)),
        TensorRule("norm.weight", (f"{prefix}.norm.weight",), (spec.hidden_size,)),
    ]
    if not spec.tie_word_embeddings:
        rules.append(TensorRule("head.weight", (HEAD,), (spec.vocab_size,)))
    return rules


def dense_layer(spec: LayerSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """A block with an MLP, of a target or a drafter."""
    assert isinstance(spec.feed_forward, MLPSpec)
    return [
        *norms(hidden_size, place),
        *attention(spec.attention, hidden_size, place),
        *mlp(spec.feed_forward, hidden_size, place),
    ]


def norms(hidden_size: int, place: Place) -> list[TensorRule]:
    """Those before attention and before the MLP."""
    return [
        place.rule("input_norm.weight", ("input_layernorm.weight",), (hidden_size,)),
        place.rule("post_norm.weight", ("post_attention_layernorm.weight",), (hidden_size,)),
    ]


def attention(spec: AttentionSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """Projections, and QK norm where there is one."""
    # values that are keys come from the keys' rows again: some more weight, but one product
    value = "self_attn.k_proj" if spec.k_eq_v else "self_attn.v_proj"
    parts = ("self_attn.q_proj", "self_attn.k_proj", value)
    sizes = (spec.width, spec.kv_width, spec.kv_width)
    rules = place.linear("attention.qkv", parts, sizes, spec.bias)
    rules += place.linear("attention.out", ("self_attn.o_proj",), (hidden_size,), spec.bias)
    if spec.qk_norm:
        norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        rules.append(place.rule("attention.qk_norm.weight", norms, (spec.head_dim,) * 2))
    return rules


def mlp(spec: MLPSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """Gate, up and down."""
    inner = (spec.intermediate_size,) * 2
    return [
        *place.linear("mlp.gate_up", ("mlp.gate_proj", "mlp.up_proj"), inner, spec.bias),
        *place.linear("mlp.down", ("mlp.down_proj",), (hidden_size,), spec.bias),
    ]
