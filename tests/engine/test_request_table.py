import pytest
import tiny
import torch

from peagle.engine.block_groups import WHOLE
from peagle.engine.request_table import RequestTable
from peagle.engine.step import BlockUpdate, Step


def table_of(rows: int, length: int, null_slot: int = 0) -> RequestTable:
    return RequestTable(rows, length, 4, torch.device("cpu"), null_slot)


def test_positions_map_to_the_slots_of_their_blocks():
    table = table_of(2, 10)
    tiny.hold(table, 1, [5, 2])
    tiny.hold(table, 1, [7], first=2)
    assert table.limits.tolist() == [0, 12]
    assert table.slots[1].tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31]


def test_a_context_ends_where_its_request_does():
    """Its last block may hold what another request left there."""
    table = table_of(2, 10, null_slot=99)
    tiny.hold(table, 0, [5, 2])
    tiny.hold(table, 1, [7])
    found = table.context(torch.tensor([0, 1]), torch.tensor([6, 2]), 6)
    assert found.tolist() == [[20, 21, 22, 23, 8, 9], [28, 29, 99, 99, 99, 99]]


@pytest.mark.parametrize(
    ("appended", "run"),
    [([[3, 4], [5]], 12), ([[0]], 0), ([[5, 2], [3]], None), ([[3], [5], [6]], None)],
)
def test_positions_in_a_row_are_found(appended: list[list[int]], run: int | None):
    table, index = table_of(1, 12), 0
    for blocks in appended:
        tiny.hold(table, 0, blocks, first=index)
        index += len(blocks)
    assert table.contiguous_from(0) == run


def test_a_row_that_is_left_and_given_out_in_one_step_knows_the_new_request_alone():
    table = table_of(2, 12, null_slot=99)
    tiny.hold(table, 0, [5, 2, 1])
    tiny.hold(table, 1, [3])
    table.update(Step(1, left=(0,), blocks=(BlockUpdate(WHOLE, 0, 0, 4),)))
    assert table.limits.tolist() == [4, 4]
    assert table.slots[0].tolist() == [16, 17, 18, 19] + [99] * 8
    assert table.slots[1].tolist() == [12, 13, 14, 15] + [99] * 8


def test_nothing_is_left_of_what_is_forgotten():
    table = table_of(2, 4, null_slot=9)
    tiny.hold(table, 0, [5])
    table.forget()
    assert table.limits.tolist() == [0, 0]
    assert table.slots.tolist() == [[9] * 4] * 2
