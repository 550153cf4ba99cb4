import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from peagle.ops.sampling import Sampling, distribution, draw, exponentials, sample

INT64 = st.integers(-(2**63), 2**63 - 1)


def rows(count: int, seed: int = 0, **settings: float) -> Sampling:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    tensors = {name: torch.full((count,), value) for name, value in values.items()}
    return Sampling(**tensors, seeds=torch.full((count,), seed))


@given(st.lists(st.tuples(INT64, st.integers(0, 2**40)), min_size=1, max_size=20))
def test_times_are_above_zero(keys: list[tuple[int, int]]):
    seeds, positions = torch.tensor(keys).unbind(dim=1)
    times = exponentials(seeds, positions, 50)
    assert times.shape == (len(keys), 50)
    assert times.dtype == torch.float32
    assert bool(((times > 0) & times.isfinite()).all())


@pytest.mark.parametrize("vary", ["seed", "position", "both", "token"])
def test_times_are_exponential_and_independent(vary: str):
    """Along seeds, positions and tokens, and from one position to the next."""
    count = torch.arange(20_000)
    still = torch.full_like(count, 7)
    seeds = count if vary in ("seed", "both") else still
    positions = count if vary in ("position", "both") else still
    shape = (1, 20_000) if vary == "token" else (20_000, 1)
    seeds, positions = seeds[: shape[0]], positions[: shape[0]]
    times = exponentials(seeds, positions, shape[1]).flatten().numpy()
    following = exponentials(seeds, positions + 1, shape[1]).flatten().numpy()
    assert stats.kstest(times, "expon").pvalue > 1e-3
    for other in (following, np.roll(times, 1)):
        if vary != "position" or other is not following:  # which is the same shifted
            assert abs(stats.spearmanr(times, other).statistic) < 0.03
    assert len(np.unique(times)) > 0.999 * len(times)


@pytest.mark.parametrize(("seed", "position", "token"), [(0, 3300429, 3), (2386240, 100, 7)])
def test_the_only_token_is_drawn_however_late_it_arrives(seed: int, position: int, token: int):
    """Of these keys float32 rounds the token's share of all times to 1."""
    logits = torch.full((1, 20), float("-inf"))
    logits[0, token] = 1.0
    assert sample(logits, rows(1, seed), torch.tensor([position])).tolist() == [token]
    assert exponentials(torch.tensor([seed]), torch.tensor([position]), 20)[0, token] > 16


def test_the_first_to_arrive_is_drawn():
    probabilities = torch.tensor([[0.2, 0.0, 0.5, 0.3]]).double().expand(3, -1)
    times = torch.tensor([[0.2, 0.1, 1.0, 1.0], [0.2, 1e-9, 0.4, 1.0], [1.0, 0.1, 9.0, 0.3]])
    assert draw(probabilities, times).tolist() == [0, 2, 3]


def test_draws_follow_the_probabilities():
    shares = torch.tensor([0.5, 0.3, 0.0, 0.15, 0.05], dtype=torch.float64)
    probabilities, kept = shares.expand(20_000, -1), shares > 0
    for seeds, positions in ((torch.arange(20_000), 5), (3, torch.arange(20_000))):
        keys = torch.broadcast_tensors(torch.as_tensor(seeds), torch.as_tensor(positions))
        counts = torch.bincount(draw(probabilities, exponentials(*keys, 5)), minlength=5)
        assert counts[~kept] == 0
        assert stats.chisquare(counts[kept], 20_000 * shares[kept]).pvalue > 1e-3


def test_logits_that_round_otherwise_hardly_change_a_draw():
    """Each by 1e-3: where two arrive together. A look-up in the cumulative distribution would
    change one draw in a hundred, since a number there moves with all tokens before it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 500, generator=generator)
    other = logits + 1e-3 * torch.randn(logits.shape, generator=generator)
    settings, positions = rows(4000), torch.arange(4000)
    changed = sample(logits, settings, positions) != sample(other, settings, positions)
    assert changed.double().mean() < 3e-3


def test_logits_that_are_no_numbers_spoil_no_other_row():
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [float("inf"), 0.0]])
    first, broken, overflowing = sample(logits, rows(3), torch.arange(3)).tolist()
    assert first == int(sample(logits[:1], rows(1), torch.arange(1)))
    assert broken == -1
    assert overflowing in (0, 1)


def test_temperature_zero_is_the_argmax_beside_rows_that_sample():
    logits = torch.randn(50, 9)
    settings = rows(50)
    settings.temperature[::2] = 0.0
    tokens = sample(logits, settings, torch.arange(50))
    assert torch.equal(tokens[::2], logits.argmax(dim=-1)[::2])
    assert not torch.equal(tokens[1::2], logits.argmax(dim=-1)[1::2])


KEPT = [  # probabilities 0.4, 0.3, 0.2, 0.1
    ({"top_k": 2}, [0, 1]),
    ({"top_k": 9}, [0, 1, 2, 3]),
    ({"top_p": 0.39}, [0]),
    ({"top_p": 1e-50}, [0]),  # 0 in float32
    ({"top_p": 0.41}, [0, 1]),
    ({"top_p": 0.71}, [0, 1, 2]),
    ({"min_p": 0.6}, [0, 1]),
    ({"min_p": 1.0}, [0]),
    ({"top_k": 3, "top_p": 0.7}, [0, 1]),  # of 0.44, 0.33, 0.22
    ({"min_p": 0.4, "top_p": 0.8}, [0, 1, 2]),
]


@pytest.mark.parametrize(("settings", "kept"), KEPT)
def test_filters_keep_the_right_tokens(settings: dict[str, float], kept: list[int]):
    order = torch.tensor([2, 0, 3, 1])
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[order][None]
    (probabilities,) = distribution(logits, rows(1, **settings))
    assert sorted(order[probabilities > 0].tolist()) == kept
    assert probabilities.sum().item() == pytest.approx(1.0)


def test_every_row_has_its_own_settings():
    logits = torch.randn(4, 12)
    own = [{"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}]
    alone = [distribution(logits[i : i + 1], rows(1, **how)) for i, how in enumerate(own)]
    mixed = rows(4)
    for row, how in enumerate(own):
        for name, value in how.items():
            getattr(mixed, name)[row] = value
    torch.testing.assert_close(distribution(logits, mixed), torch.cat(alone))
