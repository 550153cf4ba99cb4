"""Qwen3-Next: the layers of Qwen3.5's mixtures of experts. Files hold the products of a delta net
by key heads, each with what belongs to it."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from peagle.models.families import config, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, tensors
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.families.tensors import Place
from peagle.models.spec import DecoderSpec, LayerSpec
from peagle.models.weights import TensorRule
from peagle.ops.delta_net import DeltaHeads


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    qwen3_moe.refuse_dense_layers(values)
    return qwen3_5_moe_text.spec(config.with_usual(values, {"rope_theta": 10_000.0}))


def layer(spec: LayerSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """The tensors of one layer."""
    rules = tensors.layer(spec, hidden_size, place)
    if not isinstance(spec.mixer, DeltaHeads):
        return rules
    return tensors.replaced(rules, _products(spec.mixer, place))


def _products(heads: DeltaHeads, place: Place) -> list[TensorRule]:
    """The rules of a delta net's products that read the stream."""
    count, each = heads.num_key_heads, heads.num_value_heads // heads.num_key_heads
    keys, values = heads.key_dim, each * heads.value_dim
    rules = [
        *place.linear("delta_net.qkvz", ("linear_attn.in_proj_qkvz",), (heads.width,), bias=False),
        *place.linear("delta_net.gates", ("linear_attn.in_proj_ba",), (2 * count * each,), False),
    ]
    orders = _by_part(count, (keys, keys, values, values)), _by_part(count, (each, each))
    return [replace(rule, order=order) for rule, order in zip(rules, orders, strict=True)]


def _by_part(heads: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The order by which rows of heads, each with parts of these sizes, stand part by part."""
    unit = gcd(*sizes)
    order: list[int] = []
    begin = 0
    for size in sizes:
        starts = [(head * sum(sizes) + begin) // unit for head in range(heads)]
        order += [start + step for start in starts for step in range(size // unit)]
        begin += size
    return tuple(order)


FAMILY = Family(
    "qwen3_next", "Qwen3NextForCausalLM", spec, layer, ignored=qwen3_5_text.FAMILY.ignored
)
