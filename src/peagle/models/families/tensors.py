"""What most families call their tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from peagle.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    MixtureSpec,
    MLPSpec,
    NormSpec,
    SandwichSpec,
    SharedExpertsSpec,
)
from peagle.models.weights import TensorRule
from peagle.ops.delta_net import DeltaHeads

NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "input_norm": "input_layernorm",
    "attention_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}
MIXTURE_NORMS = {
    "dense_norm": "post_feedforward_layernorm_1",
    "experts_input_norm": "pre_feedforward_layernorm_2",
    "experts_norm": "post_feedforward_layernorm_2",
}
"""Ours and theirs."""


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

    def fused(
        self, name: str, parts: tuple[str, ...], sizes: tuple[int, ...], bias: bool, fused: str
    ) -> list[TensorRule]:
        """As `linear`, of parts that some files hold as one, which is called `fused`."""
        apart = self.linear(name, parts, sizes, bias)
        return either(apart, self.linear(name, (fused,), (sum(sizes),), bias))


def either(usual: list[TensorRule], other: list[TensorRule]) -> list[TensorRule]:
    """Rules of the usual layout, for files of the other, too."""
    return [replace(one, layouts=(two,)) for one, two in zip(usual, other, strict=True)]


def replaced(rules: Iterable[TensorRule], own: Iterable[TensorRule]) -> list[TensorRule]:
    """The same, a family's own rules in place of those of the same parameters."""
    by_name = {rule.ours: rule for rule in own}
    return [by_name.get(rule.ours, rule) for rule in rules]


def centred(rules: Iterable[TensorRule], norms: NormSpec) -> list[TensorRule]:
    """The same, norms with the offset of their weights."""
    return [
        replace(rule, offset=norms.offset, dtype=torch.float32)
        if norms.offset and rule.ours.endswith("norm.weight")
        else rule
        for rule in rules
    ]


def embeddings(prefix: str) -> str:
    """What the file calls the token embeddings. prefix: how the decoder's names begin."""
    return f"{prefix}.embed_tokens.weight"


def head(prefix: str) -> str:
    """What the file calls the head. prefix: as above."""
    outer = prefix.removesuffix(".model") + "." if prefix.endswith(".model") else ""
    return f"{outer}lm_head.weight"


def ends(spec: DecoderSpec, prefix: str) -> list[TensorRule]:
    """Embeddings, final norm, and the head unless it is the embeddings. prefix: as above.

    Where it is, some files hold the one tensor as the head.
    """
    size, width = (spec.vocab_size,), (spec.hidden_size,)
    embed = TensorRule("embed.weight", (embeddings(prefix),), size)
    norm = TensorRule("norm.weight", (f"{prefix}.norm.weight",), width, scale=spec.logit_scale)
    [norm] = centred([norm], spec.norm)
    if not spec.tie_word_embeddings:
        return [embed, norm, TensorRule("head.weight", (head(prefix),), size)]
    return [replace(embed, layouts=(TensorRule("embed.weight", (head(prefix),), size),)), norm]


def layer(spec: LayerSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """The tensors of one layer, of a target or a drafter."""
    if isinstance(spec.mixer, DeltaHeads):
        mixer = delta_net(spec.mixer, hidden_size, place)
    else:
        mixer = attention(spec.mixer, hidden_size, place)
    fed = feed_forward(spec.feed_forward, hidden_size, place)
    return centred([*layer_norms(spec.norms, hidden_size, place), *mixer, *fed], spec.norms)


def fused_layer(spec: LayerSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """The same of a family whose files hold q, k and v as one, and gate and up."""
    return [
        replace(rule.layouts[0], layouts=(replace(rule, layouts=()),)) if rule.layouts else rule
        for rule in layer(spec, hidden_size, place)
    ]


def layer_norms(spec: NormSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """A layer's norms over the stream, and the number that scales it where there is one."""
    if not isinstance(spec, SandwichSpec):
        return _norms(NORMS, hidden_size, place)
    scalar = [place.rule("scalar", ("layer_scalar",), (1,))] if spec.scaled else []
    return [*_norms(SANDWICH_NORMS, hidden_size, place), *scalar]


def _norms(names: Mapping[str, str], hidden_size: int, place: Place) -> list[TensorRule]:
    """names: ours and theirs."""
    return [
        place.rule(f"{ours}.weight", (f"{theirs}.weight",), (hidden_size,))
        for ours, theirs in names.items()
    ]


def attention(spec: AttentionSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """Projections, and QK norm where there is one."""
    # values that are keys come from the keys' rows again: some more weight, but one product
    value = "self_attn.k_proj" if spec.k_eq_v else "self_attn.v_proj"
    parts = ("self_attn.q_proj", "self_attn.k_proj", value)
    sizes = (spec.width, spec.kv_width, spec.kv_width)
    if spec.gated:
        rules = _gated(spec, place, parts)
    else:
        rules = place.fused("attention.qkv", parts, sizes, spec.bias, "self_attn.qkv_proj")
    rules += place.linear("attention.out", ("self_attn.o_proj",), (hidden_size,), spec.out_bias)
    if spec.qk_norm:
        norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        rules.append(place.rule("attention.qk_norm.weight", norms, (spec.head_dim,) * 2))
    return rules


def _gated(spec: AttentionSpec, place: Place, parts: tuple[str, ...]) -> list[TensorRule]:
    """The rules of q, k, v and gates in this order; the file has a head's gate behind its query."""
    heads, both = spec.num_heads, 2 * spec.num_kv_heads
    keys_and_values = range(2 * heads, 2 * heads + both)
    order = (*range(0, 2 * heads, 2), *keys_and_values, *range(1, 2 * heads, 2))
    sizes = (2 * spec.width, spec.kv_width, spec.kv_width)
    return [
        replace(rule, order=order)
        for rule in place.linear("attention.qkv", parts, sizes, spec.bias)
    ]


def delta_net(heads: DeltaHeads, hidden_size: int, place: Place) -> list[TensorRule]:
    """Projections, convolution, gates and norm of a gated delta net."""
    each, sizes = (heads.num_value_heads,), (heads.channels, heads.value_width)
    parts = "linear_attn.in_proj_qkv", "linear_attn.in_proj_z"
    gates = "linear_attn.in_proj_b", "linear_attn.in_proj_a"
    exact = [
        place.rule("delta_net.decay", ("linear_attn.A_log",), each),
        place.rule("delta_net.decay_bias", ("linear_attn.dt_bias",), each),
    ]
    return [
        *place.linear("delta_net.qkvz", parts, sizes, bias=False),
        *place.linear("delta_net.gates", gates, 2 * each, bias=False),
        place.rule("delta_net.conv", ("linear_attn.conv1d.weight",), (heads.channels,)),
        *(replace(rule, dtype=torch.float32) for rule in exact),
        place.rule("delta_net.norm", ("linear_attn.norm.weight",), (heads.value_dim,)),
        *place.linear("delta_net.out", ("linear_attn.out_proj",), (hidden_size,), bias=False),
    ]


def mlp(spec: MLPSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """Gate, up and down."""
    inner, parts = (spec.intermediate_size,) * 2, ("mlp.gate_proj", "mlp.up_proj")
    return [
        *place.fused("mlp.gate_up", parts, inner, spec.bias, "mlp.gate_up_proj"),
        *place.linear("mlp.down", ("mlp.down_proj",), (hidden_size,), spec.bias),
    ]


def feed_forward(spec: FeedForwardSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """An MLP, experts, or both."""
    if isinstance(spec, MLPSpec):
        return mlp(spec, hidden_size, place)
    if isinstance(spec, ExpertsSpec):
        router = place.rule("mlp.router", ("mlp.gate.weight",), (spec.num_experts,))
        return [router, *_experts(spec, hidden_size, place, "mlp", "mlp.experts", together=False)]
    beside = _shared if isinstance(spec, SharedExpertsSpec) else _mixture
    return beside(spec, hidden_size, place)


def _shared(spec: MixtureSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """Qwen3.5's experts, and the MLP beside them that every row goes through."""
    both, inner = ("gate_proj", "up_proj"), (spec.mlp.intermediate_size,) * 2
    parts = tuple(f"mlp.shared_expert.{part}" for part in both)
    router = place.rule("mlp.experts.router", ("mlp.gate.weight",), (spec.experts.num_experts,))
    return [
        router,
        *_experts(spec.experts, hidden_size, place, "mlp.experts", "mlp.experts", together=False),
        *place.linear("mlp.shared.gate_up", parts, inner, bias=False),
        *place.linear("mlp.shared.down", ("mlp.shared_expert.down_proj",), (hidden_size,), False),
        place.rule("mlp.shared_gate.weight", ("mlp.shared_expert_gate.weight",), (1,)),
    ]


def _mixture(spec: MixtureSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """Gemma 4's MLP and experts, each with norms of its own."""
    count = (spec.experts.num_experts,)
    return [
        *mlp(spec.mlp, hidden_size, place),
        *_norms(MIXTURE_NORMS, hidden_size, place),
        place.rule("experts.router", ("router.proj.weight",), count),
        place.rule("experts.router_scale", ("router.scale",), (hidden_size,)),
        place.rule("experts.factors", ("router.per_expert_scale",), count),
        *_experts(spec.experts, hidden_size, place, "experts", "experts", together=True),
    ]


def _experts(
    spec: ExpertsSpec, hidden_size: int, place: Place, ours: str, theirs: str, together: bool
) -> list[TensorRule]:
    """Gate and up, and down, of experts that a file holds one by one or together, [experts,
    outputs, inputs]; together: what is usual."""
    inner = spec.moe_intermediate_size
    each = [f"{theirs}.{index}" for index in range(spec.num_experts)]
    gate_up = tuple(f"{expert}.{part}_proj.weight" for expert in each for part in ("gate", "up"))
    down = tuple(f"{expert}.down_proj.weight" for expert in each)
    apart = [
        place.rule(f"{ours}.gate_up", gate_up, (inner,) * len(gate_up), leading=2),
        place.rule(f"{ours}.down", down, (hidden_size,) * len(down), leading=2),
    ]
    whole = [
        place.rule(f"{ours}.{part}", (f"{theirs}.{part}_proj",), (spec.num_experts,))
        for part in ("gate_up", "down")
    ]
    return either(whole, apart) if together else either(apart, whole)
