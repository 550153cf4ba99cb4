"""The draws of each step."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.train.packing import Document, pack
from peagle.train.recipe import Recipe
from peagle.train.schedule import Schedule

ROWS = pack([Document.answered(range(1, 13), 2)] * 7, 12)


def schedule(**changes: object) -> Schedule:
    values = {"target": "t", "data": ("d",), "output": "o", "mask_token_id": 1, "steps": 9}
    return Schedule(Recipe(**{**values, **changes}), ROWS)


@given(st.integers(1, 5), st.integers(0, 3))
def test_every_epoch_takes_every_row_once(rows_per_step: int, seed: int):
    plan = schedule(rows_per_step=rows_per_step, seed=seed)
    steps = [torch.cat(list(plan.passes(step))) for step in range(3 * len(ROWS))]
    epochs = torch.cat(steps).split(len(ROWS))[: 3 * rows_per_step]
    assert all(sorted(epoch.tolist()) == list(range(len(ROWS))) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1


@given(st.integers(1, 4), st.integers(0, 5))
def test_how_rows_are_cut_into_passes_changes_no_draw(rows_per_pass: int, step: int):
    whole = schedule(rows_per_step=4, rows_per_pass=4)
    parts = schedule(rows_per_step=4, rows_per_pass=rows_per_pass)
    assert torch.equal(torch.cat(list(parts.passes(step))), whole.passes(step)[0])
    lengths = torch.cat([chains.lengths for chains in parts.chains(step)])
    assert torch.equal(lengths, whole.chains(step)[0].lengths)


def test_eagle3_drops_nothing():
    plain = {"method": "eagle3", "mask_token_id": None, "num_speculative_tokens": 3}
    assert schedule(**plain).shares == [1.0, 1.0, 1.0]
    assert schedule(num_speculative_tokens=3, cod_ratio=0.5).shares == [1.0, 0.5, 0.25]


def test_dflash_draws_whole_blocks_behind_some_anchors():
    """Of all of a step's rows, however many tokens each has."""
    plain = {"method": "dflash", "num_speculative_tokens": 3, "rows_per_step": 4}
    plan = schedule(**plain, anchors=2)
    for step in range(3):
        lengths = torch.cat([chains.lengths for chains in plan.chains(step)])
        assert (lengths > 0).sum() == 8
    assert plan.shares == [1.0, 1.0, 1.0]
    assert (torch.cat([c.lengths for c in schedule(**plain).chains(0)]) > 0).sum() == 4 * 10
