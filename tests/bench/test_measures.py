import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.bench.measures import acceptance_interval, mean_step, measure, percentiles, token_gaps
from peagle.completion import Completion
from peagle.speculation import Speculation


def completion(times, accepted=(), k=3):
    did = Speculation([0] * k)
    for count in accepted:
        did.record(k, count)
    tokens = tuple(range(len(times)))
    return Completion("0", (1,), tokens, "", "length", did, (), tuple(times), 0.0, 0)


TWO = [
    completion([0.5, 0.6, 0.6, 0.6, 0.9], accepted=[2, 0]),
    completion([0.1, 0.2, 0.2, 0.2, 0.2, 0.3], accepted=[3, 1]),
]


def test_acceptance_is_counted_over_all_cycles_of_all_requests():
    found = measure(TWO, 1.0)
    assert found.acceptance_length == pytest.approx(1 + 6 / 4)
    assert found.acceptance_rate_per_position == pytest.approx((3 / 4, 2 / 4, 1 / 4))


def test_cycles_without_drafts_count_apart():
    """AL is over those that drafted."""
    paused = completion([0.1 * i for i in range(9)], accepted=[2, 0])
    for _ in range(4):
        paused.speculation.record(0, 0)
    found = measure([paused, TWO[1]], 1.0)
    assert found.acceptance_length == pytest.approx(1 + 6 / 4)
    assert found.tokens_per_cycle == pytest.approx(1 + 6 / 8)


def test_the_rates_and_the_length_agree():
    found = measure(TWO, 1.0)
    expected = 1 + sum(found.acceptance_rate_per_position)
    assert found.acceptance_length == pytest.approx(expected)


def test_without_speculation_every_cycle_emits_one_token():
    found = measure([completion([0.1, 0.2], k=0)], 1.0)
    assert found.acceptance_length == 1.0
    assert found.acceptance_rate_per_position == ()


def test_the_lengths_interval_is_over_requests():
    assert acceptance_interval(TWO[:1]) is None
    alike = [completion([0.1], accepted=[2, 0])] * 9
    assert acceptance_interval(alike) == pytest.approx((2.0, 2.0))
    spread = [completion([0.1], accepted=[drafts]) for drafts in (0, 1, 2, 3) * 16]
    low, high = acceptance_interval(spread)
    assert low < measure(spread, 1.0).acceptance_length < high
    assert high - low == pytest.approx(2 * 1.96 * (1.25 / 64) ** 0.5, rel=0.1)
    none = completion([0.1, 0.2])
    assert acceptance_interval([*spread, none]) == (low, high)
    assert measure(spread, seconds=1.0).acceptance_length_interval == (low, high)


def test_speed_is_tokens_over_wall_time_and_latencies_are_ms():
    found = measure(TWO, seconds=2.0)
    assert found.output_tokens == 11
    assert found.otps == pytest.approx(5.5)
    assert found.ttft_ms.p50 == pytest.approx(300.0)
    assert found.e2e_ms.p50 == pytest.approx(600.0)
    assert found.itl_ms.p50 == pytest.approx(100 / 3)


def test_a_step_that_brings_several_tokens_counts_once():
    assert mean_step([[1.0, 1.6, 1.6, 2.0], [3.0, 3.2]]) == pytest.approx(1.2 / 3)
    assert mean_step([[1.0, 1.0]]) == 0.0
    assert measure(TWO, seconds=2.0).mean_step_ms == pytest.approx(150.0)


def test_tokens_of_one_step_share_its_gap():
    assert list(token_gaps([1.0, 1.6, 1.6, 1.6, 2.0])) == pytest.approx([0.2, 0.2, 0.2, 0.4])
    assert list(token_gaps([1.0])) == []
    assert list(token_gaps([])) == []


steps = st.lists(st.tuples(st.floats(1e-4, 10), st.integers(1, 8)), min_size=1, max_size=20)


@given(steps)
def test_gaps_cover_the_time_from_the_first_token_to_the_last(steps):
    ends = list(itertools.accumulate(gap for gap, _ in steps))
    times = [end for end, (_, count) in zip(ends, steps, strict=True) for _ in range(count)]
    gaps = list(token_gaps(times))
    assert sum(gaps) == pytest.approx(times[-1] - times[0], abs=1e-9)
    assert len(gaps) == len(times) - steps[0][1]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_torchs(values):
    found = percentiles(values)
    expected = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.50, 0.95, 0.99], dtype=torch.float64)
    )
    assert [found.p50, found.p95, found.p99] == pytest.approx(expected.tolist())
