import torch

from peagle.ops.draft_rows import draft_rows

CPU = torch.device("cpu")


def laid_out(known: list[list[str]], ks: list[int]) -> tuple[list[str], list[str]]:
    """The drafter's rows by name, and those at which drafts are read."""
    sources, reads = draft_rows([len(rows) for rows in known], ks, CPU)
    names = [*(name for rows in known for name in rows), "M"]
    rows = [names[source] for source in sources.tolist()]
    return rows, [f"{rows[read]}@{read}" for read in reads.tolist()]


def test_vllms_worked_example():
    """K = 3, tokens 10 11 12 13 at 5 to 8, 13 rejected, bonus 100, as in vLLM's own account."""
    rows, reads = laid_out([["11", "12", "100"]], [3])
    assert rows == ["11", "12", "100", "M", "M"]
    assert reads == ["100@2", "M@3", "M@4"]


def test_requests_follow_one_another_with_their_own_k():
    rows, reads = laid_out([["a"], ["b", "c"], ["d", "e"], ["f"]], [2, 0, 1, 3])
    assert rows == ["a", "M", "b", "c", "d", "e", "f", "M", "M"]
    assert reads == ["a@0", "M@1", "e@5", "f@6", "M@7", "M@8"]


def test_nothing_to_read_in_the_middle_of_a_prompt():
    rows, reads = laid_out([["a", "b"]], [0])
    assert (rows, reads) == (["a", "b"], [])
