import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peagle.train.packing import Batch, Document, pack

LENGTH = 36


def conversation(turns: list[tuple[int, int]], behind: int = 0, first_token: int = 1) -> Document:
    """Alternating lengths of context and response, and some context at the end."""
    ends = list(itertools.accumulate(context + response for context, response in turns))
    responses = ((end - response, end) for (_, response), end in zip(turns, ends, strict=True))
    return Document(tuple(range(first_token, first_token + ends[-1] + behind)), tuple(responses))


def turn(least: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, 4), st.integers(1, 7))


conversations = st.builds(
    lambda first, others, behind, token: conversation([first, *others], behind, token),
    turn(least=0),
    st.lists(turn(least=1), max_size=2),
    st.integers(0, 2),
    st.integers(1, 1000),
)
"""Documents with up to three responses, and something between any two."""


def packed(documents: list[Document]) -> Batch:
    """All rows in one batch."""
    rows = pack(documents, LENGTH)
    return rows.batch(torch.arange(len(rows)))


def unpacked(tokens: Tensor, positions: Tensor, loss_mask: Tensor) -> list[Document]:
    """The documents of a row; padding has token 0."""
    starts = positions.eq(0).nonzero().flatten().tolist()
    parts = [slice(*ends) for ends in itertools.pairwise([*starts, len(tokens)])]
    assert all(positions[part].tolist() == list(range(part.stop - part.start)) for part in parts)
    documents = [Document(tuple(tokens[p].tolist()), runs(loss_mask[p])) for p in parts]
    real = list(itertools.takewhile(lambda document: document.tokens[0], documents))
    assert all(padding == Document((0,), ()) for padding in documents[len(real) :])
    return real


def runs(flags: Tensor) -> tuple[tuple[int, int], ...]:
    outside = flags.new_zeros(1)
    edges = torch.cat((outside, flags)) ^ torch.cat((flags, outside))
    return tuple((a, b) for a, b in edges.nonzero().view(-1, 2).tolist())


@given(st.lists(conversations, min_size=1, max_size=6))
def test_packing_keeps_documents_whole_and_in_order(documents: list[Document]):
    packed = pack(documents, LENGTH)
    rows = list(map(unpacked, packed.tokens, packed.positions, packed.loss_mask))
    assert list(itertools.chain(*rows)) == documents
    sizes = [[len(document.tokens) for document in row] for row in rows]
    assert all(sum(row) + other[0] > LENGTH for row, other in itertools.pairwise(sizes)), (
        "room left"
    )


def test_a_prompt_and_its_response():
    assert Document.answered([5, 6, 7], 1) == Document((5, 6, 7), ((1, 3),))


def test_a_batch_is_the_rows_asked_for_end_to_end():
    rows = pack([conversation([(1, 4)]), conversation([(2, 2)], 1, 20), conversation([(0, 3)])], 6)
    batch = rows.batch(torch.tensor([2, 0]))
    assert batch.tokens.tolist() == [1, 2, 3, 0, 0, 0, 1, 2, 3, 4, 5, 0]
    assert batch.loss_mask.nonzero().flatten().tolist() == [0, 1, 2, 7, 8, 9, 10]
    assert batch.starts.tolist() == [0, 0, 0, 3, 4, 5, 6, 6, 6, 6, 6, 11]


@given(st.lists(conversations, min_size=1, max_size=3), st.integers(1, 50))
def test_padding_comes_last_and_is_not_in_the_loss(documents: list[Document], multiple: int):
    batch = packed(documents)
    padded = batch.padded(multiple)
    length = len(batch)
    assert len(padded) == -(-length // multiple) * multiple
    for part in ("tokens", "positions", "loss_mask", "starts"):
        assert torch.equal(getattr(padded, part)[:length], getattr(batch, part))
    assert not padded.loss_mask[length:].any()
    assert padded.starts[length:].tolist() == list(range(length, len(padded)))
    assert padded.one_document == batch.one_document


def test_whether_all_that_is_learnt_is_in_the_first_document():
    said, unsaid = conversation([(2, 3), (1, 2)]), Document((1, 2, 3), ())
    assert packed([said]).one_document
    assert packed([said, unsaid]).one_document
    assert not packed([unsaid, said]).one_document
    assert not packed([said, said]).one_document
