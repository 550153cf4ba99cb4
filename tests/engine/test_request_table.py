import pytest
import torch

from peagle.engine.request_table import RequestTable


def test_positions_map_to_the_slots_of_their_blocks():
    table = RequestTable(rows=2, max_length=10, block_size=4, device=torch.device("cpu"))
    row = table.admit()
    table.append(row, 0, [5, 2])
    table.append(row, 8, [7])
    table.flush()
    assert table.limits.tolist() == [12 if i == row else 0 for i in range(2)]
    slots = [20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31]
    assert table.slots[row].tolist() == slots


def test_a_context_ends_where_its_request_does():
    """Its last block may hold what another request left there."""
    table = RequestTable(2, 10, 4, torch.device("cpu"), null_slot=99)
    rows = [table.admit(), table.admit()]
    table.append(rows[0], 0, [5, 2])
    table.append(rows[1], 0, [7])
    table.flush()
    found = table.context(torch.tensor(rows), torch.tensor([6, 2]), 6)
    assert found.tolist() == [[20, 21, 22, 23, 8, 9], [28, 29, 99, 99, 99, 99]]


@pytest.mark.parametrize(
    ("appended", "run"),
    [([[3, 4], [5]], 12), ([[0]], 0), ([[5, 2], [3]], None), ([[3], [5], [6]], None)],
)
def test_positions_in_a_row_are_found(appended: list[list[int]], run: int | None):
    table = RequestTable(rows=1, max_length=12, block_size=4, device=torch.device("cpu"))
    row, position = table.admit(), 0
    for blocks in appended:
        table.append(row, position, blocks)
        position += 4 * len(blocks)
    assert table.contiguous_from(row) == run


def test_rows_are_given_out_once_and_again_after_they_are_left():
    table = RequestTable(rows=2, max_length=4, block_size=4, device=torch.device("cpu"))
    rows = {table.admit(), table.admit()}
    assert (rows, table.free_rows) == ({0, 1}, 0)
    table.leave(1)
    assert (table.free_rows, table.admit()) == (1, 1)
