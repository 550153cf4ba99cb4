"""Random targets in published formats, whose routers send rows where they are meant to."""

from dataclasses import replace

import pytest
import torch

from peagle.bench.random_weights import OVERLAPS, Weights, correlation, random_target, target_bytes
from peagle.bench.shapes import SHAPES
from peagle.models.decoder import Decoder
from peagle.models.spec import DecoderSpec, LayerSpec, MLPSpec
from peagle.ops import moe
from peagle.ops.cached_attention import QKV
from peagle.ops.weight import format_of, weights_of

CPU = torch.device("cpu")


def small(name: str, layers: int = 8, hidden: int = 256, inner: int = 128) -> DecoderSpec:
    """A shape of fewer, smaller layers, with as many experts and as many chosen."""
    spec = SHAPES[name].target
    layer = spec.layers[0]
    heads = replace(layer.attention, num_heads=4, num_kv_heads=2, head_dim=64)
    fed = replace(layer.feed_forward, moe_intermediate_size=inner, intermediate_size=inner)
    same = layers * (LayerSpec(heads, fed),)
    return replace(spec, vocab_size=2000, hidden_size=hidden, layers=same)


def chosen_experts(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The experts [rows, top_k] of rows at every layer, in a pass over different tokens."""
    found: list[torch.Tensor] = []
    route = moe.route

    def noted(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = route(*given)  # type: ignore[arg-type]
        found.append(experts)
        return weights, experts

    monkeypatch.setattr(moe, "route", noted)
    tokens = torch.arange(10, 74)

    def attend(layer: int, qkv: QKV, heads: object) -> torch.Tensor:
        query, _, value = qkv
        each = query.shape[1] // value.shape[1]
        return value.mean(0, keepdim=True).repeat_interleave(each, 1).expand_as(query)

    with torch.no_grad():
        decoder(tokens, torch.arange(len(tokens)), attend)
    return found


def mean_in_common(found: list[torch.Tensor]) -> float:
    """The share of a row's experts that the next row has too, over layers."""
    common = [(rows[:-1, :, None] == rows[1:, None]).any(2).double() for rows in found]
    return torch.stack(common).mean().item()


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b-fp8"])
@pytest.mark.parametrize("routing", OVERLAPS)
def test_rows_share_as_many_experts_as_they_are_meant_to(
    name: str, routing: str, monkeypatch: pytest.MonkeyPatch
):
    spec = small(name)
    decoder = random_target(
        spec, CPU, torch.float32, replace(SHAPES[name].weights, routing=routing)
    )
    sizes = spec.layers[0].feed_forward
    chance = sizes.num_experts_per_tok / sizes.num_experts
    common = mean_in_common(chosen_experts(decoder, monkeypatch))
    # layers differ, since each has one draw of the part that all rows share
    assert (common - chance) / (1 - chance) == pytest.approx(OVERLAPS[routing], abs=0.12)


def test_without_a_routing_rows_are_sent_alike(monkeypatch: pytest.MonkeyPatch):
    """Why there is one."""
    decoder = random_target(small("gpt-oss-20b"), CPU, torch.float32, Weights("mxfp4"))
    found = chosen_experts(decoder, monkeypatch)
    assert mean_in_common(found[-1:]) > mean_in_common(found[:1]) + 0.3


def test_correlations_grow_with_what_is_shared():
    assert correlation(32, 4, 0.0) == 0.0
    assert 0.3 < correlation(32, 4, 0.4) < correlation(32, 4, 0.5) < correlation(32, 4, 0.9) < 1


@pytest.mark.parametrize(
    ("name", "packed"),
    [("gpt-oss-20b", "mxfp4"), ("qwen3-30b-a3b-fp8", "fp8")],
)
def test_what_is_packed_is_what_published_files_pack(name: str, packed: str):
    spec = small(name, layers=1, hidden=512, inner=512)  # scales of MXFP4 fill 512 inputs
    decoder = random_target(spec, CPU, torch.bfloat16, SHAPES[name].weights)
    layer = decoder.layers[0]
    assert format_of(layer.mlp.gate_up) == format_of(layer.mlp.down) == packed
    attention = "fp8" if packed == "fp8" else "bfloat16"
    assert format_of(layer.attention.qkv.weight) == attention
    assert format_of(decoder.head.weight) == format_of(layer.mlp.router) == "bfloat16"
    stored = sum(weight.nbytes for weight in weights_of(decoder))
    assert target_bytes(decoder.spec, torch.bfloat16, SHAPES[name].weights) == stored
    deviation = layer.mlp.gate_up.dense().std().item()
    assert deviation == pytest.approx(0.02, rel=0.2)


def test_gemma_4_keeps_its_stream_and_shares_its_embeddings():
    spec = SHAPES["gemma-4-31b"].target
    layer = replace(spec.layers[0], feed_forward=MLPSpec(64, activation="gelu_tanh"))
    spec = replace(spec, vocab_size=500, hidden_size=64, layers=(layer,))
    decoder = random_target(spec, CPU, torch.bfloat16)
    assert decoder.head.weight is decoder.embed.weight
    assert decoder.layers[0].scalar.item() == 1.0
    assert not any(value.is_meta for value in decoder.state_dict().values())
