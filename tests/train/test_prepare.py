"""What a run trains on, and what it holds out."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from peagle.errors import InputError
from peagle.train.packing import Document, PackedRows
from peagle.train.prepare import prepare, split
from peagle.train.recipe import Recipe

LENGTH = 4


def recipe(held: int, seed: int = 0) -> Recipe:
    values = {"validation_documents": held, "seed": seed, "row_length": LENGTH, "steps": 1}
    return Recipe(target="t", data=("d",), output="o", mask_token_id=0, **values)


def pieces(sample: int, count: int) -> list[Document]:
    """Documents of one sample."""
    return [Document((sample, 1), ((0, 2),), f"a:{sample}") for _ in range(count)]


def sources(rows: PackedRows) -> list[str]:
    return [document.source for row in rows.documents for document in row]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 9))
def test_pieces_of_a_sample_are_on_one_side(counts: list[int], held: int, seed: int):
    assume(held - 1 + max(counts) < sum(counts))
    documents = [piece for n, count in enumerate(counts) for piece in pieces(n, count)]
    training, validation = (sources(rows) for rows in split(documents, recipe(held, seed)))
    assert not {*training} & {*validation}
    assert sorted(training + validation) == sorted(document.source for document in documents)
    last = validation.count(validation[-1])
    assert len(validation) - last < held <= len(validation)


def test_one_sample_is_not_divided():
    with pytest.raises(InputError, match="leaves none of 9 documents in 1 samples"):
        split(pieces(0, 9), recipe(held=2))


def test_samples_read_twice_are_one():
    documents = [piece for n in range(9) for piece in pieces(n, 1)] * 2
    training, validation = split(documents, recipe(held=4))
    assert (len(sources(training)), len(sources(validation))) == (14, 4)
    assert not {*sources(training)} & {*sources(validation)}


def test_whole_samples_are_drawn_as_ever():
    """A run begun by an earlier version resumes with the rows that it had."""
    documents = [piece for n in range(20) for piece in pieces(n, 1)]
    training, validation = split(documents, recipe(held=6, seed=3))
    order = list(documents)
    random.Random(3).shuffle(order)
    assert sources(validation) + sources(training) == [document.source for document in order]


def test_a_run_that_held_out_single_pieces_is_refused(
    recipe_for: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One of an earlier version, whose drafters would now be compared by another measure."""

    def by_piece(documents: list[Document], recipe: Recipe) -> tuple[PackedRows, PackedRows]:
        apart = [Document(d.tokens, d.responses, str(n)) for n, d in enumerate(documents)]
        return split(apart, recipe)

    given = recipe_for(tmp_path / "out", row_length=30, overlong="split", steps=9)
    with monkeypatch.context() as patch:
        patch.setattr("peagle.train.prepare.split", by_piece)
        trainer = prepare(given)
    trainer.stop()
    assert trainer.run(lambda _: None).step == 1
    with pytest.raises(InputError, match="is from other data; go back to that, change output"):
        prepare(given).run(lambda _: None)
