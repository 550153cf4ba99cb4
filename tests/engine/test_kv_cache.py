import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.drafters.drafter import Span
from peagle.engine.kv_cache import KVCache
from peagle.engine.request_table import RequestTable
from peagle.models.decoder import DecoderConfig

LAYERS, HEADS, KV_HEADS, SIZE, BLOCK = 2, 4, 2, 8, 4
SHAPE = DecoderConfig(
    vocab_size=8,
    hidden_size=HEADS * SIZE,
    intermediate_size=8,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=SIZE,
)


def attended(blocks: list[int], counts: list[int]) -> list[torch.Tensor]:
    """Every pass and layer over one request whose keys lie in these blocks. [rows, ...] each."""
    table = RequestTable(1, 12, BLOCK, torch.device("cpu"))
    row, start, results = table.admit(), 0, []
    table.append(row, 0, blocks)
    table.flush()
    cache = KVCache(SHAPE, table, 12 * BLOCK, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for count in counts:
        positions, attend = cache.open([Span(row, start, count)])
        assert positions.tolist() == list(range(start, start + count))
        for layer in range(LAYERS):
            query = torch.randn(count, HEADS, SIZE, generator=generator)
            key, value = torch.randn(2, count, KV_HEADS, SIZE, generator=generator)
            results.append(attend(layer, query, key, value))
        start += max(count - 1, 1)  # the last row is rolled back and written again
    return results


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_blocks_in_a_row_give_what_scattered_blocks_give(counts: list[int]):
    together, apart = attended([5, 6, 7], counts), attended([9, 2, 7], counts)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
