"""What a GPT-OSS target's directory may hold; that it computes the right thing is invariant 3's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from test_families import Values, change_config
from test_loading import assert_weights_are_refused

from peagle.config import SamplingParams
from peagle.drafters.methods import drafter_for
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.models import loading
from peagle.models.loading import load_decoder
from peagle.models.spec import MLPSpec
from peagle.ops.weight import QuantizedWeight
from peagle.train.features import padded_for, target_features
from peagle.train.packing import Document, pack
from peagle.train.prepare import prepare

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.pack_experts(tiny.save_target(tmp_path / "target", "gpt_oss"))


CONFIGS: list[tuple[str, Callable[[Values], object], str]] = [
    ("no window", lambda c: c.pop("sliding_window"), r"config\.json lacks sliding_window"),
    ("window", lambda c: c.update(sliding_window=0), "sliding_window is 0; it must be at least 1"),
    (
        "layers",
        lambda c: c.update(layer_types=["full_attention"] * 3 + ["chunked_attention"]),
        "layers of type chunked_attention are not supported",
    ),
    ("fewer", lambda c: c["layer_types"].pop(), "layer_types names 3 of 4 layers"),
    ("alpha", lambda c: c.update(swiglu_alpha=1.0), r"swiglu_alpha 1\.0 is not 1\.702"),
    ("limit", lambda c: c.update(swiglu_limit="low"), "a value of the wrong kind"),
    ("count", lambda c: c.pop("num_local_experts"), r"config\.json lacks num_local_experts"),
    ("chosen", lambda c: c.update(num_experts_per_tok=9), "it must be at most num_experts, 8"),
    (
        "other format",
        lambda c: c["quantization_config"].update(quant_method="aqlm"),
        "quant_method aqlm is not supported; peagle reads fp8, .* mxfp4; vLLM serves others",
    ),
    (
        "sizes",
        lambda c: c.update(intermediate_size=128),
        rf"{EXPERTS}\.down_proj_blocks has shape \[8, 64, 3, 16\], expected \[8, 64, 4, 16\]",
    ),
    (
        "blocks",
        lambda c: c.update(intermediate_size=100),
        r"_proj_blocks has 100 inputs by config\.json; MXFP4 packs them in whole blocks of 32",
    ),
    ("no biases", lambda c: c.update(attention_bias=False), r"unexpected tensors: .*q_proj\.bias"),
]


@pytest.mark.parametrize(
    ("change", "message"), [c[1:] for c in CONFIGS], ids=[c[0] for c in CONFIGS]
)
def test_what_cannot_be_run(directory: Path, change: Callable[[Values], object], message: str):
    change_config(directory, change)
    with pytest.raises(InputError, match=message) as caught:
        tiny.load_target(directory)
    assert str(directory) in str(caught.value)


WEIGHTS: list[tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = [
    (
        "scales",
        lambda t: t.pop(f"{EXPERTS}.gate_up_proj_scales"),
        rf"missing tensors: {EXPERTS}\.gate_up_proj_scales$",
    ),
    (
        "blocks",
        lambda t: t.pop(f"{EXPERTS}.down_proj_blocks"),
        rf"missing tensors: {EXPERTS}\.down_proj_blocks$",
    ),
    (
        "NaN",
        lambda t: t[f"{EXPERTS}.down_proj_scales"].fill_(255),
        rf"{EXPERTS}\.down_proj_scales: MXFP4 weights hold scales that are NaN or above",
    ),
    (
        "type",
        lambda t: t.update(
            {f"{EXPERTS}.down_proj_scales": t[f"{EXPERTS}.down_proj_scales"].float()}
        ),
        r"down_proj_scales is torch\.float32; MXFP4 has torch\.uint8",
    ),
    (
        "sinks",
        lambda t: t.update({"model.layers.1.self_attn.sinks": torch.ones(3)}),
        r"sinks has shape \[3\], expected \[4\]",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [w[1:] for w in WEIGHTS], ids=[w[0] for w in WEIGHTS]
)
def test_weights_that_do_not_fit(directory: Path, change: Callable[..., object], message: str):
    assert_weights_are_refused(directory, change, message)


def test_published_keys(directory: Path):
    """OpenAI's directories name the older rope keys, and no alpha."""
    saved = tiny.load_target(directory).spec

    def publish(config: Values) -> None:
        rope = config.pop("rope_parameters")
        config.update(rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
        config.pop("swiglu_alpha", None)  # which older transformers do not write

    change_config(directory, publish)
    assert tiny.load_target(directory).spec == saved


def test_experts_stay_packed_and_are_asked_for_so(directory: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(loading, "require_memory", lambda needed, *_: asked.append(needed))
    decoder = tiny.load_target(directory, torch.bfloat16)
    packed = [part for part in decoder.modules() if isinstance(part, QuantizedWeight)]
    assert len(packed) == 2 * len(decoder.layers)
    plain = sum(2 * parameter.numel() for parameter in decoder.parameters())
    assert asked == [plain + sum(weight.nbytes for weight in packed)]
    # numbers fill whole runs of 64 inputs, scales those of 512: the tiny model has 96
    for weight in packed:
        lines, depth = weight.numel() // weight.shape[-1], weight.shape[-1]
        assert weight.nbytes == lines * (-(-depth // 64) * 32 + -(-depth // 512) * 16)


@pytest.mark.slow
def test_a_drafter_is_trained_for_it(directory: Path, recipe_for, tmp_path: Path):
    """Llama-style: neither experts, nor sinks, nor windows."""
    recipe = recipe_for(tmp_path / "drafter", target=str(directory), steps=20)
    prepare(recipe).run(lambda _: None)
    target = tiny.load_target(directory)
    model = tiny.load_drafter(tmp_path / "drafter", target)
    attention = model.config.layer.attention
    assert isinstance(model.config.layer.feed_forward, MLPSpec)
    assert attention.full
    assert not attention.bias
    assert attention.rope == target.spec.layers[0].attention.rope
    how, prompts = SamplingParams(max_tokens=16), [[5, 6, 7], list(range(1, 30))]
    plain, drafted = (
        tiny.run(Engine(target, drafter, k, tiny.engine_config()), prompts, how)
        for drafter, k in ((None, 0), (drafter_for(model), 4))
    )
    assert tiny.outputs(drafted) == tiny.outputs(plain)


@on_a_gpu
def test_a_gpu_writes_what_a_cpu_writes(targets, tmp_path: Path):
    """Its captured cycle, with chunks longer than a tile of rows and than the window."""
    directory, prompts = targets["gpt_oss"].directory, [[9], list(range(70)), list(range(3, 40))]
    config, how = tiny.engine_config(max_num_batched_tokens=48), SamplingParams(max_tokens=24)
    target = load_decoder(directory, torch.float32, torch.device("cuda"))
    drafter = tiny.random_drafter_for(target, tmp_path, tiny.drafter_config(parallel=True))
    engine = Engine(target, drafter, 4, config)
    assert engine.facts.runs_ahead
    on_cpu = Engine(targets["gpt_oss"].decoder, None, 0, config)
    expected = tiny.outputs(tiny.run(on_cpu, prompts, how))
    assert tiny.outputs(tiny.run(engine, prompts, how)) == expected
    hosted = how.model_copy(update={"logprobs": 1})
    assert tiny.outputs(tiny.run(engine, prompts, hosted)) == expected


@on_a_gpu
def test_features_on_a_gpu_are_those_of_a_cpu(targets):
    documents = [Document.answered(range(90), 5), Document.answered(range(1, 60), 5)]
    device, row = torch.device("cuda"), pack(documents, 160).batch(torch.arange(1))
    target = load_decoder(targets["gpt_oss"].directory, torch.float32, device)
    found = target_features(target, padded_for(device, row), tiny.TAPS)
    expected = target_features(targets["gpt_oss"].decoder, row, tiny.TAPS)
    torch.testing.assert_close(found.tapped[:149].cpu(), expected.tapped[:149], atol=1e-3, rtol=0)
