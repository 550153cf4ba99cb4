import torch

from peagle.engine.host.network import draft_rows

CPU = torch.device("cpu")


def laid_out(known: list[list[str]], masks: int) -> tuple[list[str], list[str]]:
    """The drafter's rows by name, and those at which drafts are read."""
    sources, reads = draft_rows([len(rows) for rows in known], masks, CPU)
    names = [*(name for rows in known for name in rows), "M"]
    rows = [names[source] for source in sources.tolist()]
    return rows, [f"{rows[read]}@{read}" for read in reads.tolist()]


def test_vllms_worked_example():
    """K = 3, tokens 10 11 12 13 at 5 to 8, 13 rejected, bonus 100, as in vLLM's own account."""
    rows, reads = laid_out([["11", "12", "100"]], 2)
    assert rows == ["11", "12", "100", "M", "M"]
    assert reads == ["100@2", "M@3", "M@4"]


def test_requests_follow_one_another():
    rows, reads = laid_out([["a"], ["b", "c"], ["d"]], 1)
    assert rows == ["a", "M", "b", "c", "M", "d", "M"]
    assert reads == ["a@0", "M@1", "c@3", "M@4", "d@5", "M@6"]


def test_without_mask_slots_the_last_known_row_is_read():
    rows, reads = laid_out([["a", "b"], ["c"]], 0)
    assert (rows, reads) == (["a", "b", "c"], ["b@1", "c@2"])
