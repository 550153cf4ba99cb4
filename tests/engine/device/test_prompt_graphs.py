"""Prompts in passes of fixed sizes, uncaptured: the same keys and tokens as launched one by one."""

import itertools
from types import SimpleNamespace

import pytest
import tiny
import torch
from random_engine import random_engine

from peagle.config import EngineConfig, SamplingParams
from peagle.drafters.fused import FusedDrafter
from peagle.engine.capacity import PROMPT_SIZES
from peagle.engine.device.models import DeviceModels
from peagle.engine.device.prefill import MOST_PAIRS, PromptGraphs
from peagle.engine.engine import Engine
from peagle.engine.kv_cache import KVCache
from peagle.engine.request_table import RequestTable
from peagle.engine.step import PromptChunk

HOW = SamplingParams(max_tokens=16)
SLOTS = 64
"""Of a cache, before the one that is nobody's."""


def prompt(length: int, seed: int) -> list[int]:
    return [(seed + 5 * i + i * i) % tiny.MASK for i in range(length)]


def engine_of(targets, drafter, resident: bool = True, **changes) -> Engine:
    k = 4 if drafter else 0
    return tiny.engine(targets["easy"].decoder, drafter, k, resident, tiny.engine_config(**changes))


@pytest.fixture
def passes(monkeypatch) -> list[bool]:
    """Whether each pass had a size of its own."""
    found: list[bool] = []
    fit = PromptGraphs.fit

    def noted(self, chunks, followed):
        graph = fit(self, chunks, followed)
        found.append(graph is not None)
        return graph

    monkeypatch.setattr(PromptGraphs, "fit", noted)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
@pytest.mark.parametrize(("count", "most"), [(1, 512), (9, 512), (9, 256)])
def test_tokens_and_accepted_drafts_of_the_plain_runner(
    targets, trained, passes, method, count, most
):
    """Drafts are as good only where the drafter's keys are right. Nine take 272 rows of tiles."""
    drafter = None if method == "none" else trained[method].drafter
    prompts = [prompt(length, seed=length) for length in (1, 15, 16, 17, 33, 2, 40, 64, 5)[-count:]]
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": most}
    plain, resident = (
        tiny.run(engine_of(targets, drafter, on, **sizes), prompts, HOW) for on in (False, True)
    )
    assert tiny.outputs(resident) == tiny.outputs(plain)
    assert [r.speculation for r in resident] == [r.speculation for r in plain]
    assert passes == [most == 512]


def test_chunks_behind_others_and_behind_cached_prefixes(targets, trained, passes):
    """Rows that begin within a context, several of which end no prompt. Drafts are as good."""
    drafter = trained["peagle"].drafter
    shared = prompt(70, 1)
    prompts = [shared + prompt(9, seed) for seed in range(3)]
    expected = tiny.run(engine_of(targets, drafter, False), prompts, HOW)
    engine = engine_of(targets, drafter, max_num_batched_tokens=64)
    for _ in range(2):
        found = tiny.run(engine, prompts, HOW)
        assert tiny.outputs(found) == tiny.outputs(expected)
        assert [r.speculation for r in found] == [r.speculation for r in expected]
    assert engine.stats.prefix_hits >= 3 * 64
    assert passes.count(True) >= len(passes) - 1


@pytest.mark.parametrize("taps", [(0, 4), (1, 2, 4)])
def test_a_tap_behind_the_last_layer_sees_every_row(targets, tmp_path, taps):
    """Elsewhere that layer runs for the prompts' ends alone."""
    target = targets["easy"].decoder
    drafter = tiny.random_drafter_for(target, tmp_path, tiny.drafter_config(True, taps=taps))
    prompts = [prompt(length, length) for length in (5, 40)]
    plain, resident = (
        tiny.run(tiny.engine(target, drafter, 4, on, tiny.engine_config()), prompts, HOW)
        for on in (False, True)
    )
    assert tiny.outputs(resident) == tiny.outputs(plain)
    assert [r.speculation for r in resident] == [r.speculation for r in plain]


def test_what_another_request_left_in_a_block_is_not_read(targets, trained):
    """It was aborted before it could say that its values are NaN."""
    target, bad = targets["easy"].decoder, tiny.MASK - 1
    changes = {"max_num_seqs": 1, "max_model_len": 64, "enable_prefix_caching": False}
    healthy = [token % bad for token in prompt(19, 3)]
    engine = engine_of(targets, trained["peagle"].drafter, **changes)
    expected = tiny.run(engine, [healthy], HOW)[0].output
    with tiny.nan_row(target.embed.weight, bad):
        engine.add("poisoned", [bad, *prompt(59, 1)], HOW)
        engine.step()
        engine.abort("poisoned")
    assert tiny.run(engine, [healthy], HOW)[0].output == expected


def table_of(max_length: int) -> RequestTable:
    """Row 0 holds a request of three blocks, and row 1 none."""
    table = RequestTable(2, max_length, 16, torch.device("cpu"), null_slot=SLOTS)
    tiny.hold(table, 0, [2, 1, 3])
    return table


def graphs_of(most: int, max_length: int) -> PromptGraphs:
    """Passes that are not run."""
    cycle = SimpleNamespace(network=None)
    return PromptGraphs(cycle, table_of(max_length), spare=1, max_batched_tokens=most)


def caches_after(
    target, drafter, ends: list[int], followed: bool = True
) -> tuple[torch.Tensor, ...]:
    """The target's and the drafter's cache of a prompt that came in chunks with these ends."""
    specs, table = (target.spec, drafter.model.config.transformer), table_of(64)
    caches = tuple(KVCache(spec, table, SLOTS, torch.float32) for spec in specs)
    cycle = DeviceModels(target, FusedDrafter(drafter.model), tiny.memory_of(*caches))
    graphs = PromptGraphs(cycle, table, spare=1, max_batched_tokens=64)
    tokens = prompt(ends[-1], 3)
    for start, stop in itertools.pairwise([0, *ends]):
        last = stop == ends[-1]
        chunk = PromptChunk(
            0, start, tuple(tokens[start:stop]), tokens[stop - last], completes=last
        )
        with torch.inference_mode():
            left = graphs.fit([chunk], followed).run([chunk])
        assert left.logits.shape == (chunk.completes, target.spec.vocab_size)
        assert (left.features is not None) == followed
    return tuple(cache.tensor for cache in caches)


def test_only_the_rows_of_requests_write_keys(targets, trained):
    for cache in caches_after(targets["easy"].decoder, trained["peagle"].drafter, [19]):
        for layer in cache.flatten(0, 1):
            written = layer.flatten(1).any(dim=1).nonzero().flatten().tolist()
            assert written == [*range(16, 19), *range(32, 48)]


def test_a_drafter_that_does_not_follow_writes_nothing(targets, trained):
    pair = targets["easy"].decoder, trained["peagle"].drafter
    followed, alone = (caches_after(*pair, [19], followed) for followed in (True, False))
    torch.testing.assert_close(alone[0], followed[0])
    assert not alone[1].any()
    assert followed[1].any()


def test_keys_are_those_of_one_chunk_however_a_prompt_is_cut(targets, trained):
    """The drafter's depend on the token behind, which the next chunk brings; not so the last."""
    target, drafter = targets["easy"].decoder, trained["peagle"].drafter
    whole, cut = (caches_after(target, drafter, ends) for ends in ([41], [16, 37, 41]))
    slots = [*range(32, 48), *range(16, 32), *range(48, 56)]
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(other[:, :, slots], one[:, :, slots])


def chunk_of(rows: int, start: int = 0) -> PromptChunk:
    return PromptChunk(0, start, (1,) * rows, 1, completes=True)


@pytest.mark.parametrize(
    ("chunks", "fits"),
    [
        ([chunk_of(PROMPT_SIZES[-1])], True),
        ([chunk_of(PROMPT_SIZES[-1] - 16), chunk_of(1)], True),
        ([chunk_of(PROMPT_SIZES[-1] - 15), chunk_of(1)], False),
        ([chunk_of(PROMPT_SIZES[-1] + 1)], False),
        ([chunk_of(1)] * (PROMPT_SIZES[-1] // 16), True),
        ([chunk_of(1)] * (PROMPT_SIZES[-1] // 16 + 1), False),
        ([chunk_of(8, MOST_PAIRS // 16 - 8)], True),
        ([chunk_of(9, MOST_PAIRS // 16 - 8)], False),
        ([chunk_of(8, MOST_PAIRS // 32 - 8), chunk_of(1)], True),
        ([chunk_of(8, MOST_PAIRS // 32), chunk_of(1)], False),
    ],
)
def test_short_chunks_that_see_little_fit(chunks, fits: bool):
    assert (graphs_of(8192, 8192).fit(chunks, False) is not None) == fits


def test_no_size_is_above_what_a_step_may_have():
    graphs = graphs_of(100, 96)
    assert graphs.fit([chunk_of(64)], False) is not None
    assert graphs.fit([chunk_of(65)], False) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_passes_give_the_tokens_of_launched_ones(monkeypatch):
    prompts = [
        [(i + 7 * j) % 512 for j in range(n)] for i, n in enumerate((1, 9, 16, 100, 300, 40))
    ]
    config = EngineConfig(dtype="float32", max_num_seqs=8, max_model_len=400)
    engine = random_engine("tiny", "peagle", 4, None, config)
    captured = [tiny.outputs(tiny.run(engine, [one, *prompts[:2]], HOW)) for one in prompts]
    monkeypatch.setattr(PromptGraphs, "fit", lambda *_: None)
    engine = random_engine("tiny", "peagle", 4, None, config)
    launched = [tiny.outputs(tiny.run(engine, [one, *prompts[:2]], HOW)) for one in prompts]
    assert captured == launched
