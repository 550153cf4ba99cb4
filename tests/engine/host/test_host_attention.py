from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine.block_groups import WHOLE
from peagle.engine.host.attention import open_pass
from peagle.engine.kv_cache import KVCache
from peagle.engine.request_table import RequestTable
from peagle.engine.spans import Span, tile_rows
from peagle.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec
from peagle.ops.cached_attention import QKV, AttentionHeads, attend_reference

LAYERS, HEADS, KV_HEADS, SIZE, BLOCK = 2, 4, 2, 16, 4
ATTENTION = AttentionSpec(HEADS, KV_HEADS, SIZE)


def spec_of(*attention: AttentionSpec) -> DecoderSpec:
    """Layers with such attention, one after another."""
    layers = tuple(LayerSpec(each, MLPSpec(8)) for each in attention)
    return DecoderSpec(8, HEADS * SIZE, layers)


PLAIN = spec_of(ATTENTION, ATTENTION)


def attended(blocks: list[int], counts: list[int], spec: DecoderSpec = PLAIN) -> list[torch.Tensor]:
    """Every pass and layer over one request whose keys lie in these blocks. [rows, ...] each."""
    heads = AttentionHeads(HEADS, KV_HEADS, SIZE)
    table = RequestTable(1, 12, BLOCK, torch.device("cpu"))
    row, start, results = 0, 0, []
    tiny.hold(table, row, blocks)
    cache = KVCache(spec, table, 12 * BLOCK, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for count in counts:
        positions, attend = open_pass(cache, [Span(row, start, count)])
        assert positions.tolist() == list(range(start, start + count))
        for layer in range(LAYERS):
            query = torch.randn(count, HEADS, SIZE, generator=generator)
            key, value = torch.randn(2, count, KV_HEADS, SIZE, generator=generator)
            results.append(attend(layer, QKV(query, key, value), heads))
        start += max(count - 1, 1)  # the last row is rolled back and written again
    return results


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_blocks_in_a_row_give_what_scattered_blocks_give(counts: list[int]):
    together, apart = attended([5, 6, 7], counts), attended([9, 2, 7], counts)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_attention_that_knows_windows_and_sinks_is_the_same_without_any(counts: list[int]):
    windowed = spec_of(ATTENTION, replace(ATTENTION, window=5))
    plain, other = attended([9, 2, 7], counts), attended([9, 2, 7], counts, windowed)
    for one, two in zip(plain, other, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-6)


WIDE = replace(ATTENTION, num_kv_heads=1, head_dim=32)


@pytest.mark.parametrize(
    ("attention", "blocks"),
    [
        ((ATTENTION, ATTENTION), [5, 6, 7]),
        ((ATTENTION, ATTENTION), [9, 2, 7]),
        ((ATTENTION, replace(ATTENTION, window=5)), [9, 2, 7]),
        ((ATTENTION, WIDE, ATTENTION), [5, 6, 7]),
    ],
    ids=["together", "apart", "windows", "several shapes"],
)
@pytest.mark.parametrize("scale", [None, 1.0])
def test_every_layer_keeps_its_own_and_forgets_what_is_cleared(
    attention: tuple[AttentionSpec, ...], blocks: list[int], scale: float | None
):
    table = RequestTable(1, 12, BLOCK, torch.device("cpu"))
    tiny.hold(table, 0, blocks)
    cache = KVCache(spec_of(*attention), table, 12 * BLOCK, torch.float32)
    seen = {}
    for start, stop in ((0, 6), (6, 9)):
        if start:
            cache.clear([(WHOLE, blocks[0])])
        positions, attend = open_pass(cache, [Span(0, start, stop - start)])
        for layer, spec in enumerate(attention):
            sizes = HEADS, spec.num_kv_heads, spec.head_dim
            heads = AttentionHeads(*sizes, spec.window, scale=scale)
            query = torch.randn(stop - start, HEADS, spec.head_dim)
            fresh = torch.randn(2, stop - start, spec.num_kv_heads, spec.head_dim)
            found = attend(layer, QKV(query, *fresh), heads)
            known = fresh if not start else torch.cat((seen[layer], fresh), dim=1)
            expected = attend_reference(query, *known, positions, heads)
            torch.testing.assert_close(found.flatten(1), expected, atol=1e-5, rtol=1e-5)
            seen[layer] = known.clone()
            seen[layer][:, :BLOCK] = 0


def test_long_spans_are_cut_into_tiles():
    table = RequestTable(2, 80, BLOCK, torch.device("cpu"))
    for row, first in ((0, 0), (1, 20)):
        tiny.hold(table, row, range(first, first + 20))
    rows = tile_rows(table, [Span(1, 3, 37), Span(0, 50, 2)])
    assert rows.requests.tolist() == [1, 1, 1, 0]
    assert rows.starts.tolist() == [3, 19, 35, 50]
    assert rows.firsts.tolist() == [0, 16, 32, 37]
    assert rows.counts.tolist() == [16, 16, 5, 2]
    assert rows.positions.tolist() == [*range(3, 40), 50, 51]
    assert rows.writes.tolist() == [*range(83, 120), 50, 51]
    assert rows.most == 16
