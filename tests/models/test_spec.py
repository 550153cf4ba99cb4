"""Layers of several kinds in one decoder: what they share, and that both ways to run them agree."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import tiny
import torch

from peagle.models.decoder import Decoder
from peagle.models.fused import fused_target
from peagle.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MixtureSpec,
    MLPSpec,
    SandwichSpec,
)
from peagle.ops import residual
from peagle.ops.cached_attention import QKVSpec, attend_reference, rotate
from peagle.ops.rope import RopeConfig

SLOW = RopeConfig(theta=1e6)
WIDE = AttentionSpec(4, 2, 16, qk_norm=True)
NEAR = replace(WIDE, window=3)
FAR = AttentionSpec(4, 1, 32, rope=SLOW, sinks=True, bias=True)
EXPERTS = ExpertsSpec(4, 2, moe_intermediate_size=24, intermediate_size=48)


def spec_of(*attention: AttentionSpec) -> DecoderSpec:
    """Layers with such attention; every other one has experts."""
    parts = (MLPSpec(48), EXPERTS)
    layers = tuple(LayerSpec(each, parts[i % 2]) for i, each in enumerate(attention))
    return DecoderSpec(tiny.VOCAB, 64, layers)


def random_decoder(spec: DecoderSpec) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(spec, 64)
    for name, parameter in decoder.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
    return decoder.requires_grad_(False).eval()


def run_fused(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """The final normed states of one sequence by the layers in few launches, without a cache."""
    layers, positions = fused_target(decoder), torch.arange(len(tokens))

    def attend(_layer: int, qkv: torch.Tensor, spec: QKVSpec) -> torch.Tensor:
        return attend_reference(*rotate(qkv, positions, spec), positions, spec)

    x = decoder.scaled(decoder.embed(tokens))
    return layers(x, residual.normed(x, layers.layers[0].input_norm), attend)[1].x


def test_geglu_without_norms_after_it_gives_the_same_in_few_launches():
    layer = LayerSpec(WIDE, MLPSpec(48, activation="gelu_tanh"))
    decoder = random_decoder(DecoderSpec(tiny.VOCAB, 64, (layer, layer)))
    tokens = torch.arange(20) * 7 % tiny.VOCAB
    expected, _ = decoder(tokens, torch.arange(20), tiny.causal)
    torch.testing.assert_close(run_fused(decoder, tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", [(WIDE, NEAR, FAR, WIDE), (FAR, NEAR)])
def test_layers_of_several_kinds_give_the_same_in_few_launches(attention: Sequence[AttentionSpec]):
    decoder, tokens = random_decoder(spec_of(*attention)), torch.arange(20) * 7 % tiny.VOCAB
    expected, _ = decoder(tokens, torch.arange(20), tiny.causal)
    torch.testing.assert_close(run_fused(decoder, tokens), expected, atol=1e-5, rtol=1e-5)


BESIDE = replace(EXPERTS, norm_topk_prob=True)
SANDWICH = LayerSpec(WIDE, MLPSpec(48, activation="gelu_tanh"), SandwichSpec(scaled=True))


@pytest.mark.parametrize(
    "last",
    [
        SANDWICH,
        replace(SANDWICH, feed_forward=MLPSpec(48)),
        replace(SANDWICH, mixer=replace(NEAR, v_norm=True, scale=1.0)),
        replace(SANDWICH, feed_forward=MixtureSpec(MLPSpec(48, activation="gelu_tanh"), BESIDE)),
        LayerSpec(replace(WIDE, v_norm=True), MLPSpec(48)),
        LayerSpec(replace(WIDE, scale=0.5), EXPERTS),
    ],
    ids=["sandwich", "its MLP", "its values and scale", "experts beside", "values", "scale"],
)
def test_layers_that_norm_what_they_add_give_the_same_in_few_launches(last: LayerSpec):
    spec = replace(spec_of(WIDE), embedding_scale=8.0)
    decoder = random_decoder(replace(spec, layers=(*spec.layers, last, spec.layers[0])))
    tokens = torch.arange(20) * 7 % tiny.VOCAB
    expected, _ = decoder(tokens, torch.arange(20), tiny.causal)
    torch.testing.assert_close(run_fused(decoder, tokens), expected, atol=1e-5, rtol=1e-5)


def test_every_layer_sees_and_turns_by_its_own_spec():
    tokens = torch.arange(20) * 7 % tiny.VOCAB
    one, *others = (
        run_fused(random_decoder(spec_of(WIDE, second)), tokens)
        for second in (WIDE, NEAR, replace(WIDE, rope=SLOW))
    )
    for other in others:
        assert not torch.allclose(one, other, atol=1e-3)


def test_layers_that_rotate_alike_share_a_table():
    rope = random_decoder(spec_of(WIDE, NEAR, FAR, WIDE)).rope
    tables = [rope.of_layers()[layer][0] for layer in range(4)]
    assert tables[0] is tables[1] is tables[3]
    assert [len(table[0, 0]) for table in tables] == [16, 16, 32, 16]
