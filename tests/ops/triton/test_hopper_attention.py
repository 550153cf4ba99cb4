"""What of Hopper's attention needs no GPU: which passes it takes, and how it divides them."""

import pytest
import torch
from paged_rows import heads_of, pass_rows


def taken(
    rows: int, requests: int = 2, dtype: torch.dtype = torch.bfloat16, size: int = 128
) -> bool:
    from peagle.ops.triton import hopper_attention

    counts = [rows] * requests
    placed = pass_rows([64] * requests, counts, rows)
    qkv, cache = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    return bool(hopper_attention.takes(qkv, heads_of(8, size), cache, placed))


def test_few_rows_of_half_precision_are_taken() -> None:
    assert taken(1)
    assert taken(8)
    assert taken(3, dtype=torch.float16)
    assert taken(2, size=64)
    assert not taken(8, dtype=torch.float32)
    assert not taken(8, size=32)
    assert not taken(17, requests=40)


def test_many_rows_are_where_there_are_several_requests() -> None:
    assert not taken(9)
    assert taken(9, requests=8)
    assert taken(16, requests=8)


@pytest.mark.parametrize("requests", [1, 3, 8, 9, 40, 300])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("lines", [8, 64])
def test_every_multiprocessor_has_a_part_and_none_waits_for_a_second_turn(
    requests: int, size: int, lines: int
) -> None:
    from peagle.ops.triton.hopper_attention import MOST_PARTS, programs

    pairs = requests * 8
    warps, parts = programs(pairs, lines, size, 132)
    together = 8 // warps
    assert 1 <= parts <= MOST_PARTS
    assert pairs * parts <= 132 * together or parts == 1
    assert pairs * (parts + 1) > 132 * together or parts == MOST_PARTS
    assert warps == 4 or (size == 128 and lines < 64)


def test_four_programs_share_a_multiprocessor_where_two_would_leave_pairs_waiting() -> None:
    from peagle.ops.triton.hopper_attention import is_crowded

    assert not is_crowded(264, 128, 4, 132)
    assert is_crowded(265, 128, 4, 132)
    assert not is_crowded(512, 64, 4, 132)
    assert not is_crowded(512, 128, 1, 132)
