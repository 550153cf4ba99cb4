"""Gemma 4's layers by the kernels, with a cache, against the plain decoder."""

from dataclasses import replace

import pytest
import tiny
import torch
from paged_rows import on, pass_rows

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
from peagle.ops import cached_attention, residual, triton
from peagle.ops.cached_attention import QKVSpec

NEAR = AttentionSpec(4, 2, 16, window=3, qk_norm=True, v_norm=True, scale=1.0)
FAR = replace(NEAR, num_kv_heads=1, head_dim=32, window=None)
EXPERTS = ExpertsSpec(6, 2, 24, 24, norm_topk_prob=True)


def decoder_of(beside: ExpertsSpec | None) -> Decoder:
    mlp = MLPSpec(40, activation="gelu_tanh")
    fed = mlp if beside is None else MixtureSpec(mlp, beside)
    layers = [LayerSpec(each, fed, SandwichSpec(scaled=True)) for each in (NEAR, FAR)]
    decoder = Decoder(DecoderSpec(tiny.VOCAB, 64, tuple(layers), embedding_scale=8.0), 64)
    for name, parameter in decoder.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
    return decoder.requires_grad_(False).eval()


@pytest.mark.parametrize("beside", [None, EXPERTS], ids=["MLP", "experts beside"])
@pytest.mark.parametrize("rows", [7, 20])
def test_layers_in_few_launches_are_the_decoder(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, beside: ExpertsSpec | None, rows: int
):
    """A whole sequence at once, in slots of a cache."""
    torch.manual_seed(0)
    decoder, tokens = decoder_of(beside), torch.arange(rows) * 7 % tiny.VOCAB
    expected, _ = decoder(tokens, torch.arange(rows), tiny.causal)
    monkeypatch.setattr(triton, "has_kernels", lambda x: True)
    decoder, placed = decoder.to(device), on(device, pass_rows([0], [rows], rows))
    caches = [torch.zeros(2, 1100, *sizes, device=device) for sizes in ((2, 16), (1, 32))]

    def attend(layer: int, qkv: torch.Tensor, spec: QKVSpec) -> torch.Tensor:
        return cached_attention.attend_product(qkv, spec, caches[layer], placed)

    layers, stream = fused_target(decoder), decoder.scaled(decoder.embed(tokens.to(device)))
    with torch.inference_mode():
        _, last = layers(stream, residual.normed(stream, decoder.layers[0].input_norm), attend)
    # the last row has no slot
    torch.testing.assert_close(last.x[:-1].cpu(), expected[:-1], rtol=1e-4, atol=1e-4)
