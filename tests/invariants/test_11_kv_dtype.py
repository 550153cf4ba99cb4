"""Invariant 11: at one type of the KV cache, the text with a drafter is the text without one."""

from collections.abc import Sequence

import pytest
import tiny

from peagle.config import SamplingParams
from peagle.drafters.proposer import Drafter
from peagle.engine.engine import Engine
from peagle.speculation import Speculation

NEW = 24
PROMPTS = [
    tuple((11 * i + 3 * stream + i * i) % tiny.MASK for i in range(length))
    for stream, length in ((0, 5), (1, 40), (0, 61), (0, 64))
]


def texts(
    target, drafter: Drafter | None, resident: bool, rounds: int = 1, **changes: object
) -> Sequence[list[list[int]]]:
    """What some rounds of the prompts give; later rounds find the first in the prefix cache."""
    config = tiny.engine_config(max_model_len=96, **{"kv_cache_dtype": "fp8", **changes})
    k = 0 if drafter is None else 5
    engine = tiny.engine(target.decoder, drafter, k, resident, config)
    params = SamplingParams(max_tokens=NEW)
    return [tiny.outputs(tiny.run(engine, PROMPTS, params)) for _ in range(rounds)]


@pytest.mark.parametrize("resident", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma4", "qwen3_5"])
def test_speculation_changes_no_token_of_a_cache_in_fp8(
    targets, drafter_of, family: str, resident: bool
) -> None:
    target = targets[family]
    [expected] = texts(target, None, resident)
    found = texts(target, drafter_of(True), resident, 2, max_num_batched_tokens=24)
    assert [*found] == [expected, expected]


def test_host_and_device_write_the_same(targets) -> None:
    assert texts(targets["qwen3"], None, False) == texts(targets["qwen3"], None, True)


def test_right_drafts_are_accepted(targets, trained) -> None:
    """A drafter's own cache is rounded, too, and still it is right."""
    target, drafter = targets["easy"], trained["peagle"].drafter
    lengths = {}
    for kv_cache_dtype in ("auto", "fp8"):
        config = tiny.engine_config(max_model_len=96, kv_cache_dtype=kv_cache_dtype)
        engine = tiny.engine(target.decoder, drafter, 5, False, config)
        found = tiny.run(engine, PROMPTS, SamplingParams(max_tokens=NEW))
        every = Speculation.pooled([vars(request)["speculation"] for request in found])
        lengths[kv_cache_dtype] = every.acceptance_length
    assert lengths["fp8"] > max(1.3, 0.8 * lengths["auto"])


def test_memory_holds_four_times_the_tokens_of_float32(targets) -> None:
    def blocks(kv_cache_dtype: str) -> int:
        config = tiny.engine_config(kv_cache_dtype=kv_cache_dtype, kv_cache_memory=1 << 18)
        return Engine(targets["qwen3"].decoder, None, 0, config).blocks.num_blocks

    assert blocks("fp8") == 4 * blocks("auto")


def test_keys_are_rounded_at_all(targets) -> None:
    target = targets["qwen3"]
    assert texts(target, None, False) != texts(target, None, False, kv_cache_dtype="auto")
