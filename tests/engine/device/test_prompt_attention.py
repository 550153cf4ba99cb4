"""Attention of prompts' chunks: as one row after another would attend, in few shapes."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.drafters.fused import FusedDrafter
from peagle.engine.device import prompt_attention as module
from peagle.engine.device.models import DeviceModels
from peagle.engine.device.prefill import Prefill, PromptGraphs
from peagle.engine.device.prompt_attention import filled, prompt_attention, warm_up
from peagle.engine.kv_cache import KVCache
from peagle.engine.request_table import RequestTable
from peagle.engine.spans import Span, tile_rows
from peagle.ops.cached_attention import QKVSpec, store_attend
from peagle.ops.moe import RoutedExperts
from peagle.ops.rope import RopeConfig, rope_table

LENGTH, BLOCK = 320, 16
SPEC = QKVSpec(4, 2, 16, rotations=rope_table(RopeConfig(), 16, LENGTH), norm_weight=None, eps=1e-6)
WIDTH = 8 * 16
Shape = tuple[tuple[int, ...], tuple[int, ...]]


def table_of(requests: int) -> RequestTable:
    """Requests of the greatest length, whose blocks are in no order."""
    table = RequestTable(requests, LENGTH, BLOCK, torch.device("cpu"))
    blocks = torch.randperm(requests * LENGTH // BLOCK).view(requests, -1)
    for row in range(requests):
        tiny.hold(table, row, blocks[row].tolist())
    return table


def spans_of(chunks: list[tuple[int, int]]) -> list[Span]:
    """Of (start, rows), in the order in which they come."""
    ordered = sorted(chunks, key=lambda chunk: (chunk[0] > 0, -chunk[1]))
    return [Span(row, start, rows) for row, (start, rows) in enumerate(ordered)]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Shape, Shape]]:
    """Of queries and keys that attended together, and their strides, since plans hang on both."""
    found = set()
    attention = module.causal_attention

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        found.add(tuple((tuple(side.shape), side.stride()) for side in (query, key)))
        return attention(query, key, value)

    monkeypatch.setattr(module, "causal_attention", noted)
    # on a GPU a kernel that knows no shapes
    monkeypatch.setattr(module, "packed_attention", lambda query, *_: query)
    return found


chunk = st.tuples(st.sampled_from([0, 0, 0, 1, 16, 50]), st.integers(1, 150))


@settings(deadline=None, max_examples=40)
@given(st.lists(chunk, min_size=1, max_size=9), st.sampled_from([0, 1, 30]), st.booleans())
def test_rows_attend_as_in_tiles_and_leave_the_same_keys(
    chunks: list[tuple[int, int]], idle: int, windowed: bool
) -> None:
    torch.manual_seed(0)
    spans, table = spans_of(chunks), table_of(len(chunks))
    spec = replace(SPEC, window=40) if windowed else SPEC
    count = sum(span.count for span in spans)
    qkv = torch.randn(count + idle, WIDTH)
    ours = tiny.kv_cache(table, 3, len(spans) * LENGTH)
    theirs = ours.tensor.clone()
    found = prompt_attention(table, spans, idle)(ours)(1, qkv.clone(), spec)
    expected = store_attend(qkv[:count], spec, theirs[1], tile_rows(table, spans))
    assert len(found) == len(qkv)
    assert not found.isnan().any()
    torch.testing.assert_close(found[:count], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.tensor, theirs)


@given(st.integers(1, 1 << 20))
def test_lengths_are_filled_up_by_a_quarter_at_most(rows: int) -> None:
    assert rows <= filled(rows) < rows + max(rows / 4, 16)
    assert filled(filled(rows)) == filled(rows)


@pytest.mark.slow
def test_prompts_of_any_length_have_few_shapes(shapes: set) -> None:
    table = table_of(5)
    cache = tiny.kv_cache(table, 1, 5 * LENGTH)
    for rows in range(1, LENGTH):
        for together in (1, 2, 3, 5):
            spans = [Span(row, 0, rows) for row in range(together)]
            qkv = torch.randn(together * rows, WIDTH)
            prompt_attention(table, spans)(cache)(0, qkv, SPEC)
    lengths = {*range(16, 129, 16), 160, 192, 224, 256, 320}
    assert {query[2] for (query, _), _ in shapes} == lengths
    assert {query[0] for (query, _), _ in shapes} == {1, 2, 4}


@pytest.mark.parametrize(
    ("chunks", "packed", "groups"),
    [
        ([(0, 40), (0, 40), (0, 40)], [], 2),
        ([(0, 70), (0, 40), (0, 5)], [[70, 40, 5]], 0),
        ([(0, 170), (0, 130), (0, 70), (0, 40), (0, 5)], [[70, 40, 5]], 2),
        ([(0, 170), (0, 130), (0, 70), (0, 5)], [], 4),
        ([(0, 170), (0, 40), (16, 150), (16, 1), (90, 7)], [[40, 150, 7, 1]], 1),
        ([(16, 1)] * 5, [[1] * 5], 0),
    ],
)
def test_chunks_after_contexts_and_of_many_lengths_are_one_call(
    monkeypatch: pytest.MonkeyPatch,
    chunks: list[tuple[int, int]],
    packed: list[list[int]],
    groups: int,
) -> None:
    calls, together = [], []
    monkeypatch.setattr(module, "MAX_SHARED_ROWS", 130)
    monkeypatch.setattr(
        module, "packed_attention", lambda *given: together.append(given[3].counts) or given[0]
    )
    monkeypatch.setattr(
        module, "causal_attention", lambda *given: calls.append(given[0].shape) or given[0]
    )
    spans, table = spans_of(chunks), table_of(5)
    rows = sum(span.count for span in spans)
    cache, qkv = tiny.kv_cache(table, 1, 5 * LENGTH), torch.randn(rows, WIDTH)
    prompt_attention(table, spans)(cache)(0, qkv, SPEC)
    assert (together, len(calls)) == (packed, groups)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("before", [[0] * 5, [700, 0, 1, 16, 3000]], ids=["alone", "contexts"])
def test_one_call_for_many_lengths_is_one_for_each(before: list[int]) -> None:
    device, counts = torch.device("cuda"), [1, 16, 17, 300, 1000]
    contexts = [start + count for start, count in zip(before, counts, strict=True)]
    bounds = module.Bounds(counts, contexts, device)
    assert bounds.ends is not None
    lengths = ((sum(counts), 32), (sum(contexts), 8), (sum(contexts), 8))
    sides = [torch.randn(*length, 128, device=device).bfloat16() for length in lengths]
    found = module.packed_attention(*sides, bounds)
    bounds.ends = None
    expected = module.packed_attention(*sides, bounds)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_a_plan_meets_every_shape_of_single_prompts_and_changes_nothing(shapes: set) -> None:
    table = table_of(1)
    cache = tiny.kv_cache(table, 1, LENGTH)
    before = cache.tensor.clone()
    warm_up(SPEC, cache.layers[0], torch.float32, 200)
    assert torch.equal(cache.tensor, before)
    planned = set(shapes)
    shapes.clear()
    for rows in range(1, 201):
        qkv = torch.randn(rows, WIDTH)
        prompt_attention(table, [Span(0, 0, rows)])(cache)(0, qkv, SPEC)
    assert shapes == planned


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_moe"])
def test_a_prefill_compiles_its_targets_experts_once(
    targets: dict, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """All layers' kernels are the same."""
    warmed: list[int] = []
    monkeypatch.setattr(RoutedExperts, "warm_up", lambda self, most: warmed.append(most))
    target, table = targets[family].decoder, table_of(1)
    memory = tiny.memory_of(KVCache(target.spec, table, 64, torch.float32))
    cycle = DeviceModels(target, None, memory)
    Prefill(cycle, table, PromptGraphs(cycle, table, 0, 16)).warm_up(40)
    assert warmed == [40]


def test_a_prefill_plans_for_target_and_drafter_where_cudnn_serves(
    targets: dict, trained: dict, shapes: set, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets["easy"].decoder
    drafter = FusedDrafter(trained["peagle"].drafter.model)
    each = (target.spec.layers[0].attention, drafter.model.config.layer.attention)
    table = table_of(1)
    specs = target.spec, drafter.model.config.transformer
    ours, theirs = (KVCache(spec, table, 64, torch.bfloat16) for spec in specs)
    cycle = DeviceModels(target, drafter, tiny.memory_of(ours, theirs))
    prefill = Prefill(cycle, table, PromptGraphs(cycle, table, 0, 16))
    prefill.warm_up(40)
    assert not shapes
    monkeypatch.setattr("peagle.engine.device.prefill.on_hopper", lambda cache: True)
    prefill.warm_up(40)
    counts = {heads.num_heads for heads in each}
    assert {query[:3] for (query, _), _ in shapes} == {
        (1, count, rows) for count in counts for rows in (16, 32, 48)
    }
    assert not any(layer.any() for cache in (ours, theirs) for layer in cache.layers.values())


def test_nothing_is_planned_for_a_target_of_one_order_of_sums(
    targets: dict, shapes: set, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompts attend tile by tile."""
    target, table = tiny.load_target(targets["easy"].directory), table_of(1)
    target.make_batch_invariant()
    cache = KVCache(target.spec, table, 64, torch.bfloat16)
    cycle = DeviceModels(target, None, tiny.memory_of(cache))
    monkeypatch.setattr("peagle.engine.device.prefill.on_hopper", lambda cache: True)
    Prefill(cycle, table, PromptGraphs(cycle, table, 0, 16)).warm_up(40)
    assert not shapes
