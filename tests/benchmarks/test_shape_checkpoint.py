"""Directories of random weights in a shape's size."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.quantizers import quantizer_finegrained_fp8

from checkpoint import with_words, write_target
from peagle.bench.case import Setup
from peagle.bench.load import Exchange, drive
from peagle.bench.random_weights import Weights, random_target
from peagle.bench.shapes import SHAPES, Shape, random_mtp, shape_of
from peagle.bench.synthetic import SyntheticWorkload
from peagle.config import EngineConfig, SamplingParams
from peagle.drafters.diagnosis import diagnose
from peagle.drafters.kind import PEAGLE
from peagle.drafters.mtp import load_mtp
from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.models.spec import ExpertsSpec
from peagle.models.weights import read_tensors
from peagle.ops.weight import QuantizedWeight, Weight, weights_of
from peagle.pair import bundled

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"
E4M3 = torch.float8_e4m3fn
EXPERTS = "model.layers.0.mlp.experts"
TENSORS = {
    "gpt-oss-20b": {
        f"{EXPERTS}.gate_up_proj_blocks": (torch.uint8, [32, 256, 8, 16]),
        f"{EXPERTS}.gate_up_proj_scales": (torch.uint8, [32, 256, 8]),
        f"{EXPERTS}.down_proj_blocks": (torch.uint8, [32, 256, 4, 16]),
        f"{EXPERTS}.down_proj_bias": (torch.bfloat16, [32, 256]),
        "model.layers.0.self_attn.q_proj.weight": (torch.bfloat16, [256, 256]),
        "model.layers.0.self_attn.sinks": (torch.bfloat16, [4]),
        "model.layers.0.mlp.router.bias": (torch.bfloat16, [32]),
    },
    "qwen3-30b-a3b-fp8": {
        f"{EXPERTS}.127.gate_proj.weight": (E4M3, [128, 256]),
        f"{EXPERTS}.127.gate_proj.weight_scale_inv": (torch.float32, [1, 2]),
        f"{EXPERTS}.0.down_proj.weight_scale_inv": (torch.float32, [2, 1]),
        "model.layers.1.self_attn.k_proj.weight_scale_inv": (torch.float32, [1, 2]),
        "model.layers.1.mlp.gate.weight": (torch.bfloat16, [128, 256]),
    },
    "qwen3-8b-fp8": {
        "model.layers.0.mlp.up_proj.weight": (E4M3, [128, 256]),
        "model.layers.0.mlp.up_proj.weight_scale_inv": (torch.float32, [1, 2]),
        "lm_head.weight": (torch.bfloat16, [512, 256]),
    },
    "qwen3-8b-int4": {
        "model.layers.0.mlp.up_proj.weight_packed": (torch.int32, [128, 32]),
        "model.layers.0.mlp.up_proj.weight_scale": (torch.bfloat16, [128, 2]),
        "model.layers.0.mlp.up_proj.weight_shape": (torch.int64, [2]),
        "lm_head.weight": (torch.bfloat16, [512, 256]),
    },
    "qwen3-30b-a3b-nvfp4": {
        f"{EXPERTS}.127.gate_proj.weight_packed": (torch.uint8, [128, 128]),
        f"{EXPERTS}.127.gate_proj.weight_scale": (E4M3, [128, 16]),
        f"{EXPERTS}.127.gate_proj.weight_global_scale": (torch.float32, [1]),
    },
}
"""Some of each file's, as published files name and shape them."""
pytestmark = pytest.mark.usefixtures("forked")


def small(name: str) -> Shape:
    """A packed shape of two smaller layers, with as many experts as it has."""
    shape = SHAPES[name]
    layers = [
        replace(
            layer,
            mixer=replace(layer.mixer, num_heads=4, num_kv_heads=2, head_dim=64),
            feed_forward=replace(
                layer.feed_forward,
                intermediate_size=128,
                **({"moe_intermediate_size": 128} if has_experts(shape) else {}),
            ),
        )
        for layer in shape.target.layers[:2]
    ]
    spec = replace(shape.target, vocab_size=512, hidden_size=256, layers=tuple(layers))
    return replace(shape, target=spec)


def has_experts(shape: Shape) -> bool:
    return isinstance(shape.target.layers[0].feed_forward, ExpertsSpec)


def written(shape: Shape, weights: Weights, directory: Path, dtype: str = "bfloat16") -> Path:
    write_target(directory, shape, weights, dtype, tiny.CPU)
    return directory


def bytes_of(weight: Weight) -> torch.Tensor:
    """All bytes of a weight, scales included."""
    if isinstance(weight, QuantizedWeight):
        return torch.cat([weight.numbers.flatten(), weight.scale_bytes.flatten()])
    return weight.detach().flatten().view(torch.uint8)


def assert_same_weights(one: Decoder, other: Decoder) -> None:
    for ours, theirs in zip(weights_of(one), weights_of(other), strict=True):
        assert torch.equal(bytes_of(ours), bytes_of(theirs))


def test_every_id_is_text():
    given = (bundled("target") / "tokenizer.json").read_text()
    wide, plain = (Tokenizer.from_str(text) for text in (with_words(given, 5000), given))
    assert wide.get_vocab_size() == 5000
    assert wide.decode([plain.encode("def").ids[0], 4999, 4096]) == "def w4999 w4096"
    assert wide.encode("a w4999").ids == plain.encode("a w4999").ids


def test_the_script_writes_a_pair(tmp_path: Path):
    out = tmp_path / "pair"
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--dtype", "float32"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    wanted = random_target(shape_of("tiny").target, tiny.CPU, torch.float32)
    assert_same_weights(tiny.load_target(out / "target"), wanted)
    assert not diagnose(out / "drafter", out / "target", PEAGLE).problems
    again = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (
        1,
        f"checkpoint.py: {out} exists; give another name\n",
    )


@pytest.mark.parametrize("routing", ["half", "independent"])
@pytest.mark.parametrize("name", TENSORS)
def test_what_is_read_is_bit_for_bit_what_would_be_made(tmp_path: Path, name: str, routing: str):
    shape = small(name)
    weights = shape.weights.routed(routing)
    directory = written(shape, weights, tmp_path / "target")
    loaded = tiny.load_target(directory, torch.bfloat16)
    assert loaded.spec == shape.target
    assert_same_weights(loaded, random_target(shape.target, tiny.CPU, torch.bfloat16, weights))


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_called_and_shaped_as_in_published_files(tmp_path: Path, name: str):
    tensors = read_tensors(written(small(name), SHAPES[name].weights, tmp_path / "target"))
    found = {key: (tensors[key].dtype, [*tensors[key].shape]) for key in TENSORS[name]}
    assert found == TENSORS[name]


def test_transformers_reads_mxfp4_as_we_do(tmp_path: Path):
    assert_transformers_agrees("gpt-oss-20b", tmp_path / "target", Mxfp4Config(dequantize=True))


@pytest.mark.parametrize("name", ["qwen3-8b-fp8", "qwen3-30b-a3b-fp8"])
def test_transformers_reads_fp8_as_we_do(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    # which it asks for first, and needs only for what is not widened
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    assert_transformers_agrees(name, tmp_path / "target", FineGrainedFP8Config(dequantize=True))


def assert_transformers_agrees(name: str, directory: Path, widened: object) -> None:
    """Equal logits of what transformers widens as it loads."""
    shape = small(name)
    written(shape, shape.weights, directory, "float32")
    read = AutoModelForCausalLM.from_pretrained
    peer = read(directory, quantization_config=widened, dtype="float32").float().eval()
    tokens = [(13 * i + i * i) % 512 for i in range(200)]
    found = tiny.run_target(tiny.load_target(directory), tokens, (1,))[0]
    torch.testing.assert_close(found, tiny.peer_logits(peer, tokens), atol=1e-3, rtol=0)


def test_a_benchmark_reads_it(tmp_path: Path):
    """With a head of zeros all it writes is the first token."""
    shape = shape_of("tiny")
    directory = written(shape, shape.weights, tmp_path / "target", "float32")
    last = directory / "model-00009-of-00009.safetensors"
    tensors = load_file(last)
    save_file(tensors | {"lm_head.weight": torch.zeros(512, 64)}, last, {"format": "pt"})
    given = {"acceptance_length": 2.0, "prompt_tokens": 4, "max_tokens": 4}
    given |= {"engine": EngineConfig(dtype="float32")}
    workload = SyntheticWorkload("tiny", **given, checkpoint=directory)
    assert workload.describe()["checkpoint"] == "target"
    how = SamplingParams(max_tokens=4, ignore_eos=True)
    llm = workload.open(Setup("none", 0, "fixed"), 1)
    [completion] = drive(llm, [Exchange([5, 6, 7], how)], 1)
    assert [*completion.token_ids] == [0] * 4
    with pytest.raises(InputError, match="is not in the shape of qwen3-8b"):
        SyntheticWorkload("qwen3-8b", **given, checkpoint=directory)


def test_a_target_with_recurrent_layers_has_its_own_head(tmp_path: Path):
    shape, weights = SHAPES["tiny-hybrid"], Weights()
    place = written(shape, weights, tmp_path / "target", "float32")
    target = tiny.load_target(place)
    head, wanted = load_mtp(place, target), random_mtp(target, weights).model
    for ours, theirs in zip(weights_of(head), weights_of(wanted), strict=True):
        assert torch.equal(bytes_of(ours), bytes_of(theirs))
