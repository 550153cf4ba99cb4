"""Around Hopper's attention, on any machine: which passes it takes, and how it divides them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_rows import on, pass_rows, spec_of

from peagle.ops.weight import E4M3


def taken(
    rows: int,
    requests: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    size: int = 128,
    v_norm: bool = False,
) -> bool:
    from peagle.ops.triton import hopper_attention

    counts = [rows] * requests
    placed = pass_rows([64] * requests, counts, rows)
    spec = spec_of(8, size, v_norm=v_norm)
    return bool(hopper_attention.takes(spec, torch.zeros(1, dtype=dtype), placed))


def test_few_rows_of_half_precision_are_taken() -> None:
    assert taken(1)
    assert taken(8)
    assert taken(3, dtype=torch.float16)
    assert taken(2, size=64)
    assert not taken(8, dtype=torch.float32)
    assert not taken(8, size=32)
    assert taken(1, v_norm=True)
    assert taken(8, size=256)
    assert not taken(9, size=256)
    assert not taken(1, size=256, dtype=E4M3)


@pytest.mark.parametrize("requests", [1, 8, 40])
def test_as_many_rows_are_as_a_tile_has_lines_for(requests: int) -> None:
    assert taken(16, requests=requests)
    assert not taken(17, requests=requests)


@pytest.mark.parametrize("few_lines", [True, False])
def test_programs_are_as_large_as_few_pairs_leave_room_for(few_lines: bool) -> None:
    from peagle.ops.triton.hopper_attention import programs

    assert programs(8, few_lines, 128, 4, 132) == (1 if few_lines else 2)
    assert programs(66, few_lines, 128, 4, 132) == (1 if few_lines else 2)
    assert programs(8, few_lines, 64, 4, 132) == 2
    assert programs(67, few_lines, 128, 4, 132) == 2
    assert programs(264, few_lines, 128, 4, 132) == 2
    assert programs(265, few_lines, 128, 4, 132) == 4
    assert programs(512, few_lines, 64, 4, 132) == 2
    assert programs(66, few_lines, 256, 2, 132) == (1 if few_lines else 2)
    assert programs(512, few_lines, 256, 2, 132) == 2
    assert programs(512, few_lines, 128, 1, 132) == 2


@pytest.mark.parametrize(
    ("requests", "tree", "large"),
    [(1, True, True), (33, True, True), (1, False, True), (16, False, True), (17, False, False)],
)
def test_many_lines_are_columns_where_programs_are_large(
    requests: int, tree: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peagle.ops.triton import hopper_attention

    monkeypatch.setattr(hopper_attention, "multiprocessors", lambda _: 132)
    rows = pass_rows([64] * requests, [16] * requests, 16)
    if tree:
        rows = replace(rows, ancestors=torch.ones(16 * requests, dtype=torch.int32))
    tiling = hopper_attention._tiling(spec_of(8, 128), rows)
    assert tiling.lines == 64
    assert (tiling.together == 1) == large
    assert tiling.by_rows != large


def parts_of(starts: list[int], room: int, least: int = 4, kv_heads: int = 8) -> list[int]:
    """Into how many parts each context is divided; every part comes once, in order."""
    from peagle.ops.triton.hopper_attention.division import divide, most_items

    rows = pass_rows([0] * len(starts), [4] * len(starts), 4)
    rows = replace(rows, starts=torch.tensor(starts), limits=torch.tensor(starts) + 4)
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = divide(on(where, rows), kv_heads, 64, least, room).tolist()
    assert len(found) == most_items(len(starts), kv_heads, room)
    counts = [0] * len(starts)
    for request, _, parts in found:
        counts[request] = parts if request >= 0 else counts[request]
    items = [[r, part, parts] for r, parts in enumerate(counts) for part in range(parts)]
    assert found[: len(items)] == items
    assert all(request == -1 for request, *_ in found[len(items) :])
    return counts


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 8, 16])
def test_few_contexts_of_a_length_have_as_many_parts_as_run_at_once(requests: int) -> None:
    counts = parts_of([8000] * requests, 264)
    assert counts == [min(264 // (8 * requests), 16)] * requests


def test_a_context_that_is_longer_has_more_parts() -> None:
    assert parts_of([30_000, 600, 600, 600], 132) == [13, 1, 1, 1]
    assert parts_of([600] * 63 + [30_000], 528) == [1] * 63 + [14]
    assert parts_of([600] * 40 + [900] * 24, 528) == [1] * 64


def test_no_part_is_smaller_than_it_is_worth() -> None:
    assert parts_of([200], 264) == [2]
    assert parts_of([0, 63, 64, 600], 528, least=10) == [1, 1, 1, 2]


@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=80),
    st.sampled_from([132, 264, 528]),
    st.sampled_from([1, 4, 8, 16]),
)
@settings(deadline=None, max_examples=50)
def test_contexts_of_any_lengths_find_room(starts: list[int], room: int, kv_heads: int) -> None:
    from peagle.ops.triton.hopper_attention.division import are_few, most_items

    def parts(share: int) -> list[int]:
        return [-(-each // share) for each in tiles]

    tiles = [1 + -(-start // 64) for start in starts]
    share = max(4, -(-max(tiles) // 16))
    if are_few(len(tiles), kv_heads, room):
        while sum(parts(share)) > most_items(len(tiles), kv_heads, room):
            share += 1
    else:
        share = max(share, -(-kv_heads * sum(tiles) // (room // 2)))
    assert parts_of(starts, room, kv_heads=kv_heads) == parts(share)
