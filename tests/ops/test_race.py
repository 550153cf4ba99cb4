"""Drafts that share the target's draw, against the race written out with numpy."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.ops.acceptance import shared_draw
from peagle.ops.race import SHARPENING, Race, draft_scores
from peagle.ops.sampling import Sampling, arrival_times, exponentials, sample

VOCAB = 24
settings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 3, 100]),
        "min_p": st.sampled_from([0.0, 0.1, 0.6]),
        "seeds": st.integers(-(2**63), 2**63 - 1),
    }
)


def sampling(rows: list[dict]) -> Sampling:
    columns = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return Sampling(**columns, top_p=torch.full((len(rows),), 0.1))


def race(rows: list[dict], positions: list[int]) -> Race:
    """Of all rows of a table, for first drafts at some positions."""
    newest, every = torch.tensor(positions) - 1, torch.arange(len(rows))
    return Race(sampling(rows), newest, every)


@given(st.lists(settings, min_size=1, max_size=3), st.integers(0, 2**31), st.integers(0, 4))
def test_the_draft_is_the_first_to_arrive(rows: list[dict], start: int, depth: int):
    generator = torch.Generator().manual_seed(start)
    positions = [start + i for i in range(len(rows))]
    tokens = torch.stack(
        [torch.randperm(VOCAB, generator=generator)[:6] for _ in range(2 * len(rows))]
    ).view(len(rows), 2, 6)
    scores = 3 * torch.randn(len(rows), 2, 4, 6, generator=generator)
    found = draft_scores(scores, tokens, race(rows, positions), depth).argmax(dim=-1)
    for r, row in enumerate(rows):
        for slot in range(2):
            seed, position = (
                torch.tensor([row["seeds"]]),
                torch.tensor([positions[r] + depth + slot]),
            )
            times = exponentials(seed, position, VOCAB)[0].double().numpy()[tokens[r, slot]]
            for previous in range(4):
                logits = scores[r, slot, previous].double().numpy()
                assert int(found[r, slot, previous]) == winner(logits, times, row)


def winner(logits: np.ndarray, times: np.ndarray, row: dict) -> int:
    if row["temperature"] == 0:
        return int(logits.argmax())
    shares = np.exp((logits - logits.max()) / row["temperature"])
    kept = shares >= row["min_p"] * (1 - 1e-6)
    if row["top_k"]:
        kept &= logits >= np.sort(logits)[::-1][: row["top_k"]][-1]
    heated = np.where(
        kept, np.exp((logits - logits.max()) / (row["temperature"] * SHARPENING)), 0.0
    )
    return int((heated / times).argmax())


def test_the_target_s_own_logits_draft_its_own_tokens():
    """At the same temperature both are the same race."""
    rows = [
        {"temperature": t, "top_k": k, "min_p": 0.0, "seeds": seed}
        for seed in range(40)
        for t, k in [(0.8, 0), (1.3, 5), (1.0, 0)]
    ]
    positions = [7 * i for i in range(len(rows))]
    logits = 2 * torch.randn(len(rows), VOCAB)
    how = Sampling(**{**sampling(rows)._asdict(), "top_p": torch.ones(len(rows))})
    chosen = sample(logits, how, torch.tensor(positions) + 3)
    tokens = torch.arange(VOCAB).expand(len(rows), 1, VOCAB)
    heated = [{**row, "temperature": row["temperature"] / SHARPENING} for row in rows]
    found = draft_scores(logits[:, None, None], tokens, race(heated, positions), 3)
    assert torch.equal(found[:, 0, 0].argmax(dim=-1), chosen)
    assert not torch.equal(logits.argmax(dim=-1), chosen)


def test_some_tokens_arrive_when_they_do_among_all():
    seeds, positions = torch.tensor([5, -9]), torch.tensor([3, 4])
    tokens = torch.tensor([[7, 0, 90], [1, 2, 3]])
    whole = exponentials(seeds, positions, 100)
    assert torch.equal(arrival_times(seeds, positions, tokens), whole.gather(1, tokens))


def test_how_often_both_draw_the_same_is_as_computed():
    """Also where the draft can only be some of the tokens."""
    draws = 40_000
    generator = torch.Generator().manual_seed(0)
    for known in (VOCAB, 6):
        p = (1.5 * torch.randn(VOCAB, generator=generator)).softmax(dim=-1)
        q = (1.5 * torch.randn(known, generator=generator)).softmax(dim=-1)
        q = 0.5 * q + 0.5 * p[:known] / p[:known].sum()
        times = exponentials(torch.arange(draws), torch.zeros(draws, dtype=torch.int64), VOCAB)
        theirs, ours = (p / times).argmax(dim=-1), (q / times[:, :known]).argmax(dim=-1)
        share = float((theirs == ours).double().mean())
        expected = float(shared_draw(p[None, :known], q[None]))
        assert abs(share - expected) < 4 * (expected * (1 - expected) / draws) ** 0.5
        assert 0.2 < expected < 0.95


def test_equal_distributions_always_draw_the_same():
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(shared_draw(p, p), torch.ones(2, dtype=torch.float64))
    assert shared_draw(p[:1], torch.tensor([[0.0, 0.0, 0.0, 1.0]])).tolist() == [0.0]
