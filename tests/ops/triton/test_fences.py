"""Cycles of every kind of model and format are replayed without computing anything: what a kernel
reads before its own wait was written before a launch that waited for it."""

import inspect
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction

from peagle.engine.device.cycle import CycleShape
from peagle.models.decoder import Decoder
from peagle.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MixtureSpec,
    MLPSpec,
    SandwichSpec,
    SharedExpertsSpec,
)
from peagle.ops import triton as chooser
from peagle.ops.delta_net import DeltaHeads
from peagle.ops.linear import Linear
from peagle.ops.moe import RoutedExperts
from peagle.ops.triton import launch, layer_chain
from peagle.ops.triton.layer_chain import products
from peagle.ops.weight import FP8, INT4, MXFP4, NVFP4, QuantizedWeight, replace_weight

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are interpreted ones")
HIDDEN = 256
HEADS = AttentionSpec(4, 2, 64, qk_norm=True)
MLP, EXPERTS = MLPSpec(512), ExpertsSpec(8, 2, 256, 256, True)
RECURRENT = DeltaHeads(2, 4, 64, 64)
NEAR = replace(HEADS, window=16)
GEGLU = MixtureSpec(MLPSpec(512, activation="gelu_tanh"), EXPERTS)
MODELS = {
    "dense": [LayerSpec(HEADS, MLP)] * 3,
    "windows": [LayerSpec(NEAR, MLP), LayerSpec(HEADS, MLP)] * 2,
    "experts": [LayerSpec(HEADS, EXPERTS)] * 3,
    "recurrent": [*[LayerSpec(RECURRENT, MLP)] * 2, LayerSpec(HEADS, MLP)] * 2,
    "recurrent, experts": [
        LayerSpec(RECURRENT, SharedExpertsSpec(MLP, EXPERTS)),
        LayerSpec(HEADS, SharedExpertsSpec(MLP, EXPERTS)),
    ]
    * 2,
    "sandwich": [LayerSpec(each, GEGLU, SandwichSpec(scaled=True)) for each in (NEAR, HEADS)] * 2,
}
FORMATS = {
    "bf16": None,
    "fp8": (FP8, (128, 128), torch.float32),
    "mxfp4": (MXFP4, (1, 32), torch.uint8),
    "nvfp4": (NVFP4, (1, 16), torch.float8_e4m3fn),
    "int4": (INT4, (1, 128), torch.bfloat16),
}
WAITS = re.compile(r"gdc_wait\(|(?<!\w)wait\(")
ANNOUNCES = re.compile(r"gdc_launch_dependents\(|(?<!\w)(?:announce|begin)\(")
WRITTEN = {
    "_attend_part": ("_verify_inputs", "_draft_inputs", "_divide"),
    "_down_kernel": ("_route_few_kernel", "_layout_kernel"),
}
"""Kernels that read before their own wait, and those that write what they read."""


@dataclass(frozen=True)
class Launch:
    """A kernel that was launched."""

    name: str
    fence: bool
    """By its options and its source: whether all before it is done when another one begins."""
    early: bool
    """Whether it reads before its own wait."""


def announces_late(kernel: Any) -> bool:
    """Whether a kernel lets the next one begin after its own wait."""
    source = inspect.getsource(
        products.multiply_all.fn if kernel is layer_chain._chain else kernel.fn
    )
    waits, announces = WAITS.search(source), ANNOUNCES.search(source)
    return waits is not None and announces is not None and waits.start() < announces.start()


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What is launched from now on, as on a Hopper GPU; nothing is computed."""
    found: list[Launch] = []

    def noted(kernel: Any, _grid: Any) -> Any:
        def run(*_given: Any, **options: Any) -> None:
            plain, tiling = not options.get("launch_pdl"), options.get("TILING")
            early = tiling is None or tiling.settled
            found.append(Launch(kernel.__name__, plain or announces_late(kernel), early))

        return run

    for kind in (InterpretedFunction, GluonJITFunction):
        monkeypatch.setattr(kind, "__getitem__", noted)
    for name in ("has_kernels", "on_hopper"):
        monkeypatch.setattr(chooser, name, lambda x: True)
    monkeypatch.setattr(launch, "overlaps", lambda x: True)
    monkeypatch.setattr(layer_chain, "is_shared", lambda: False)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    return found


def decoder_of(model: str, form: str) -> Decoder:
    spec = DecoderSpec(tiny.VOCAB, HIDDEN, tuple(MODELS[model]), max_length=256)
    decoder = Decoder(spec, 256).to(torch.bfloat16).requires_grad_(False).eval()
    if form != "bf16":
        for layer in decoder.layers:
            for part in [*layer.modules()]:
                for own in ("weight",) if isinstance(part, Linear) else ():
                    replace_weight(part, own, packed(part.weight.shape, form))
                for own in ("gate_up", "down") if isinstance(part, RoutedExperts) else ():
                    replace_weight(part, own, packed(getattr(part, own).shape, form))
    return decoder


def packed(shape: tuple[int, ...], form: str) -> QuantizedWeight:
    """Zeros in a format."""
    kind, (high, wide), dtype = FORMATS[form]
    *leading, outputs, depth = shape
    numbers = torch.zeros(*leading, outputs, depth * kind.bits // 8, dtype=torch.uint8)
    scales = torch.zeros(*leading, -(-outputs // high), -(-depth // wide)).to(dtype)
    factors = torch.ones(*leading, outputs) if kind is NVFP4 else None
    return QuantizedWeight(kind, numbers, scales, (high, wide), None, factors)


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("parallel", [False, True], ids=["EAGLE-3", "P-EAGLE"])
def test_what_is_read_early_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parallel: bool, model: str, form: str
):
    """By a target, and by a drafter of two layers, in a cycle of few rows; and nothing waits that
    need not."""
    launched = replayed(monkeypatch, tmp_path, parallel, model, form)
    read = [place for place, one in enumerate(launched) if one.name in WRITTEN]
    assert {launched[place].name for place in read} >= {"_attend_part"}
    for place in read:
        one = launched[place]
        last = max(i for i in range(place) if launched[i].name in WRITTEN[one.name])
        fenced = any(between.fence for between in launched[last + 1 : place])
        assert one.early == fenced, (place, launched)


def test_no_attention_but_the_first_waits_where_a_layer_announces_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Since attention itself is a fence; recurrent layers before it are none."""
    early = {}
    for model in ("dense", "recurrent"):
        launched = replayed(monkeypatch, tmp_path / model, True, model, "fp8")
        of_target = launched[[one.name for one in launched].index("_verify_inputs") :]
        early[model] = [one.early for one in of_target if one.name == "_attend_part"]
    assert early == {"dense": [False, True, True], "recurrent": [False, True]}


def replayed(
    monkeypatch: pytest.MonkeyPatch, directory: Path, parallel: bool, model: str, form: str
) -> list[Launch]:
    """A cycle of two requests."""
    decoder = decoder_of(model, form)
    stack = DecoderSpec(tiny.VOCAB, HIDDEN, tuple(MODELS["dense"][:2]), max_length=256)
    config = tiny.drafter_config(parallel, transformer=stack, target_hidden_size=HIDDEN)
    drafter = tiny.random_drafter_for(decoder, directory, config)
    engine = tiny.engine(decoder, drafter, 3, True, tiny.engine_config(dtype="bfloat16"))
    with monkeypatch.context() as patch:
        launched = recorded(patch)
        engine.worker.graphs.run([0, 1], CycleShape(3, 4))
    return launched
