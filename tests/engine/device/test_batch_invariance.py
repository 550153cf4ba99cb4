"""Text that depends neither on drafts nor on what else is in flight, also in 16 bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch

from peagle import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.config import DType
from peagle.drafters.checkpoint import EMBEDDINGS, HEAD, save_drafter
from peagle.engine.engine import Engine
from peagle.engine.spans import TILE
from peagle.engine.worker import check_batch_invariance
from peagle.engine_client import source
from peagle.errors import InputError
from peagle.models.decoder import Attention, Decoder
from peagle.models.loading import load_decoder
from peagle.ops.cached_attention import FIXED_ROWS
from peagle.ops.linear import Linear
from peagle.ops.weight import fp8, replace_weight
from peagle.pair import bundled

PROMPTS = [[(5 * i + j) % tiny.MASK for j in range(9 + 4 * i)] for i in range(4)]
GREEDY = SamplingParams(max_tokens=40)
TEXTS = [
    f"def {name}(items):\n    " for name in ("total", "merge", "find_all", "to_json", "sort_by")
]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_an_engine_that_is_told_marks_its_target(monkeypatch: pytest.MonkeyPatch):
    loaded: list[Decoder] = []

    def load(*given) -> Decoder:
        loaded.append(load_decoder(*given))
        return loaded[-1]

    monkeypatch.setattr(source, "load_decoder", load)
    for told in (False, True):
        config = EngineConfig(batch_invariant=told, device="cpu", kv_cache_memory=1 << 22)
        drafter = SpeculativeConfig(model=str(bundled("peagle")))
        LLM(bundled("target"), drafter, config)
        marked = [m for m in loaded[-1].modules() if isinstance(m, Linear | Attention)]
        assert {m.batch_invariant for m in marked} == {told}
        assert all(m.heads.batch_invariant == told for m in marked if isinstance(m, Attention))


@pytest.mark.parametrize("method", [None, "eagle3", "peagle"])
def test_a_marked_target_writes_the_same_in_32_bits(targets, trained, method: str | None):
    drafter = trained[method].drafter if method else None
    k = 4 if method else 0
    plain = Engine(targets["easy"].decoder, None, 0, tiny.engine_config())
    wanted = tiny.outputs(tiny.run(plain, PROMPTS, GREEDY))
    own = tiny.load_target(targets["easy"].directory)
    own.make_batch_invariant()
    engine = tiny.engine(own, drafter, k, True, tiny.engine_config())
    assert tiny.outputs(tiny.run(engine, PROMPTS, GREEDY)) == wanted


def test_a_head_that_a_drafter_shares_stays_fast_in_drafts(targets, tmp_path: Path):
    own = tiny.load_target(targets["easy"].directory)
    own.make_batch_invariant()
    model, shared = tiny.random_drafter(tiny.drafter_config(True)), frozenset({EMBEDDINGS, HEAD})
    save_drafter(tmp_path / "drafter", model, torch.float32, shared=shared)
    drafting = tiny.load_drafter(tmp_path / "drafter", own).readout.head
    assert drafting.weight is own.head.weight
    assert (own.head.batch_invariant, drafting.batch_invariant) == (True, False)


def test_more_rows_of_a_request_than_a_program_has_room_for(targets, trained):
    own = tiny.load_target(targets["easy"].directory)
    own.make_batch_invariant()
    drafter, config = trained["peagle"].drafter, tiny.engine_config()
    assert tiny.engine(own, drafter, FIXED_ROWS - 1, True, config).k == 15
    with pytest.raises(InputError, match="K = 16 is above 15, the most with batch_invariant"):
        tiny.engine(own, drafter, FIXED_ROWS, True, config)
    assert TILE <= FIXED_ROWS  # a prompt's


def test_a_gpu_without_kernels_for_a_target(targets, monkeypatch: pytest.MonkeyPatch):
    """In place of texts that are another's matter all the same."""
    own = tiny.load_target(targets["easy"].directory)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    check_batch_invariance(own, 7, captures=True)
    with pytest.raises(InputError, match="batch_invariant needs GPU kernels"):
        check_batch_invariance(own, 7, captures=False)
    own.layers[0].mlp.down = narrow = Linear(96, 64)
    replace_weight(narrow, "weight", fp8(torch.randn(64, 96)))
    with pytest.raises(InputError, match="batch_invariant needs GPU kernels"):
        check_batch_invariance(own, 7, captures=True)


@on_a_gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_and_load_change_nothing_in_16_bits(temperature: float):
    alone = list(written(None, 1, temperature))
    for drafter in (None, "eagle3", "peagle"):
        assert list(written(drafter, len(TEXTS), temperature)) == alone


def written(
    drafter: str | None, at_once: int, temperature: float, dtype: DType = "bfloat16"
) -> Iterator[str]:
    """The texts of an engine, so many requests at a time."""
    config = EngineConfig(
        batch_invariant=True, dtype=dtype, max_num_seqs=8, enable_prefix_caching=False
    )
    speculation = SpeculativeConfig(model=str(bundled(drafter))) if drafter else None
    llm = LLM(bundled("target"), speculation, config)
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=5, ignore_eos=True)
    for first in range(0, len(TEXTS), at_once):
        for completion in llm.generate(TEXTS[first : first + at_once], params):
            yield completion.text
