"""On a CPU packed weights are widened at loading, where its memory has room for them."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from packed_targets import FORMS, pack_target
from test_quantization import quantize

from peagle.config import EngineConfig, SamplingParams
from peagle.engine.engine import Engine
from peagle.engine_client.source import load_target
from peagle.models import loading
from peagle.models.decoder import Decoder
from peagle.models.loading import load_ends, widen_on_cpu
from peagle.ops.linear import Linear
from peagle.ops.weight import QuantizedWeight, format_of, weight_at, weights_of
from peagle.train.parallel import Ranks
from peagle.train.sharding import load_sharded
from peagle.train.teacher import Teacher

TOKENS = list(range(3, 60))
WHOLLY = "nvfp4 of modelopt, the head too"
KV = 1 << 22


def in_fp8(directory: Path, family: str) -> Path:
    tiny.save_target(directory, family)
    quantize(directory, "fp8 in blocks")
    return directory


def in_mxfp4(directory: Path, _: str) -> Path:
    return tiny.pack_experts(tiny.save_target(directory, "gpt_oss"))


def with_head(directory: Path, family: str) -> Path:
    pack_target(tiny.save_target(directory, family, tie_word_embeddings=False), FORMS[WHOLLY])
    return directory


def packed_in(decoder: torch.nn.Module) -> dict[str, QuantizedWeight]:
    return {n: w for n, w in decoder.named_modules() if isinstance(w, QuantizedWeight)}


def needed_by(decoder: Decoder, dtype: torch.dtype) -> int:
    """Bytes of the weights alone, those of products twice."""
    sizes = [weight.shape for weight in packed_in(decoder).values()]
    return sum(math.prod(size) * (2 if len(size) == 2 else 1) for size in sizes) * dtype.itemsize


def engine_target(directory: Path, dtype: str = "float32") -> Decoder:
    return load_target(directory, EngineConfig(device="cpu", dtype=dtype, kv_cache_memory=KV))


@pytest.mark.parametrize(
    ("packing", "family"),
    [(in_fp8, "qwen3"), (in_fp8, "qwen3_moe"), (in_mxfp4, "gpt_oss"), (with_head, "llama")],
)
def test_an_engine_multiplies_by_the_numbers_that_the_files_stand_for(
    tmp_path: Path, packing: Callable[[Path, str], Path], family: str
):
    directory = packing(tmp_path / "target", family)
    packed, wide = tiny.load_target(directory), engine_target(directory)
    named = packed_in(packed)
    assert named
    assert not packed_in(wide)
    for name, weight in named.items():
        assert torch.equal(weight_at(wide, name), weight.dense()), name
    assert not any(parameter.requires_grad for parameter in wide.parameters())
    products = [part for part in wide.modules() if isinstance(part, Linear)]
    assert all(part.packed for part in products) == torch.backends.mkl.is_available()
    found, wanted = (tiny.run_target(each, TOKENS)[0] for each in (wide, packed))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_its_text_is_that_of_the_packed_weights(tmp_path: Path):
    directory = in_fp8(tmp_path / "target", "qwen3")
    packed, wide = tiny.load_target(directory), engine_target(directory)
    drafter = tiny.random_drafter_for(wide, tmp_path, tiny.drafter_config(parallel=True))
    how, prompts = SamplingParams(max_tokens=20), [TOKENS[:9], TOKENS[20:50]]
    config = tiny.engine_config()
    engines = Engine(packed, None, 0, config), Engine(wide, drafter, 5, config)
    wanted, found = (tiny.outputs(tiny.run(engine, prompts, how)) for engine in engines)
    assert found == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packing", [in_fp8, in_mxfp4])
def test_where_memory_has_no_room_weights_stay_packed_and_a_line_says_what_helps(
    tmp_path: Path,
    packing: Callable[[Path, str], Path],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
):
    directory = packing(tmp_path / "target", "qwen3")
    packed = tiny.load_target(directory, getattr(torch, dtype))
    enough = needed_by(packed, packed.embed.weight.dtype) + KV
    monkeypatch.setattr(loading, "free_memory", lambda _: enough)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not packed_in(engine_target(directory, dtype))
    monkeypatch.setattr(loading, "free_memory", lambda _: enough - 1)
    with pytest.warns(UserWarning, match="packed weights stay packed, which is slow") as said:
        kept = engine_target(directory, dtype)
    assert packed_in(kept).keys() == packed_in(packed).keys()
    [line] = said
    assert ("take dtype bfloat16" in str(line.message)) == (dtype == "float32")
    found, wanted = (tiny.run_target(each, TOKENS)[0] for each in (kept, packed))
    assert torch.equal(found, wanted)


def test_bfloat16_rounds_each_number_once(tmp_path: Path):
    directory = in_fp8(tmp_path / "target", "qwen3")
    wide = engine_target(directory, "bfloat16")
    for name, weight in packed_in(tiny.load_target(directory)).items():
        assert torch.equal(weight_at(wide, name), weight.dense().bfloat16())


def test_a_trainers_target_is_widened_whole_or_its_ends_alone(tmp_path: Path):
    directory = with_head(tmp_path / "target", "qwen3")
    head = tiny.load_target(directory).head.weight
    assert isinstance(head, QuantizedWeight)
    assert not packed_in(load_sharded(directory, torch.float32, tiny.CPU, Ranks()))
    teacher = Teacher(directory, tiny.load_target(directory).spec, own=True)
    ends, _ = teacher.ends(torch.float32, tiny.CPU)
    assert torch.equal(ends.head.weight, head.dense())


def test_elsewhere_all_stays_as_the_files_have_it(tmp_path: Path):
    directory = with_head(tmp_path / "target", "qwen3")
    ends = load_ends(directory, torch.float32, tiny.CPU)
    widen_on_cpu(ends, torch.empty(0, device="meta"))
    assert "nvfp4" in map(format_of, weights_of(ends))
