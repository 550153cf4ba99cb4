import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from peagle.ops.sampling import Sampling, distribution, draw, sample, uniforms

LARGEST = 1 - 2**-53
"""The largest value `uniforms` gives."""
INT64 = st.integers(-(2**63), 2**63 - 1)


def rows(count: int, seed: int = 0, **settings: float) -> Sampling:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    tensors = {name: torch.full((count,), value) for name, value in values.items()}
    return Sampling(**tensors, seeds=torch.full((count,), seed))


@given(st.lists(st.tuples(INT64, st.integers(0, 2**40)), min_size=1, max_size=20))
def test_uniforms_lie_in_the_unit_interval(keys: list[tuple[int, int]]):
    seeds, positions = torch.tensor(keys).unbind(dim=1)
    values = uniforms(seeds, positions)
    assert values.dtype == torch.float64
    assert bool(((values >= 0) & (values < 1)).all())


@pytest.mark.parametrize("vary", ["seed", "position", "both"])
def test_uniforms_are_uniform_and_independent(vary: str):
    """Along seeds, along positions, and from one position to the next."""
    count = torch.arange(20_000)
    still = torch.full_like(count, 7)
    seeds = still if vary == "position" else count
    positions = still if vary == "seed" else count
    values = uniforms(seeds, positions).numpy()
    assert stats.kstest(values, "uniform").pvalue > 1e-3
    following = uniforms(seeds, positions + 1).numpy()
    assert abs(np.corrcoef(values, following)[0, 1]) < 0.03
    if vary != "position":
        assert len(np.unique(values)) == len(values)


def test_draw_inverts_the_cumulative_distribution():
    probabilities = torch.tensor([[0.2, 0.0, 0.5, 0.3]]).double().expand(6, -1)
    uniform = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, LARGEST], dtype=torch.float64)
    assert draw(probabilities, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_draw_never_takes_what_has_no_probability():
    edges = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]).double()
    for uniform in (0.0, 0.5, LARGEST):
        tokens = draw(edges, torch.full((3,), uniform, dtype=torch.float64))
        assert bool((edges[torch.arange(3), tokens] > 0).all())


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
