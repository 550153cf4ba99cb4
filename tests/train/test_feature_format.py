"""One-byte numbers with a scale for each slice."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.train.feature_format import dequantise, quantise

WIDTH = 16


@given(
    seed=st.integers(0, 1000),
    exponents=st.lists(st.floats(-60, 60), min_size=3, max_size=3),
    outlier=st.floats(1, 1e4),
)
def test_the_error_is_bounded_token_by_token(seed: int, exponents: list[float], outlier: float):
    """Within a sixteenth of a number or, for tiny ones, 2**-18 of the largest in its slice."""
    generator = torch.Generator().manual_seed(seed)
    slices = torch.randn(5, 3, WIDTH, generator=generator) * torch.tensor(exponents).exp2()[:, None]
    slices[:, :, 0] *= outlier
    numbers, scales = quantise(slices.flatten(1), WIDTH)
    assert numbers.dtype == torch.float8_e4m3fn
    assert scales.shape == (5, 3)
    error = (dequantise(numbers, scales, torch.float32).view_as(slices) - slices).abs()
    floor = slices.abs().amax(-1, keepdim=True) * 2**-17
    assert bool((error <= torch.maximum(slices.abs() / 16, floor)).all())


@given(seed=st.integers(0, 1000), outlier=st.floats(1e-6, 1e6))
def test_a_slice_does_not_cost_another_its_precision(seed: int, outlier: float):
    states = torch.randn(4, 2 * WIDTH, generator=torch.Generator().manual_seed(seed))
    louder = states.clone()
    louder[:, WIDTH:] *= outlier
    for one, other in zip(quantise(states, WIDTH), quantise(louder, WIDTH), strict=True):
        half = one.shape[1] // 2
        assert torch.equal(one[:, :half].float(), other[:, :half].float())


def test_restored_numbers_are_exact_in_bfloat16():
    states = torch.randn(50, 2 * WIDTH) * 37
    numbers, scales = quantise(states, WIDTH)
    half, whole = (dequantise(numbers, scales, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert torch.equal(half.float(), whole)


def test_the_least_and_the_largest_stay_finite():
    states = torch.tensor([[0.0], [1e-45], [1e-30], [3e38], [448.0], [449.0]]).repeat(1, WIDTH)
    numbers, scales = quantise(states, WIDTH)
    found = dequantise(numbers, scales, torch.float32)
    torch.testing.assert_close(found, states, rtol=1 / 16, atol=1e-32)
