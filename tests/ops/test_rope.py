"""Scalings are compared with transformers' in invariants/test_3_parity.py."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.ops.rope import RopeConfig, apply_rope, rope_table, rotation_at

HEAD, LENGTH = 16, 64


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Pairs (i, i + half) as complex numbers, turned by position * theta ** (-2i / head_dim)."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    speed = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = (
        pairs
        * torch.polar(torch.tensor(1.0).double(), positions[:, None].double() * speed)[:, None]
    )
    return torch.cat((turned.real, turned.imag), dim=-1).float()


@given(
    positions=st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=6),
    theta=st.sampled_from([10.0, 10000.0, 1e6]),
)
def test_rope_turns_pairs_by_their_position(positions: list[int], theta: float):
    table = rope_table(RopeConfig(theta=theta), HEAD, LENGTH)
    x, where = torch.randn(len(positions), 3, HEAD), torch.tensor(positions)
    torch.testing.assert_close(
        apply_rope(x, rotation_at(table, where)), rotated(x, where, theta), atol=1e-4, rtol=0
    )


def test_position_zero_changes_nothing():
    x = torch.randn(1, 2, HEAD)
    table = rope_table(RopeConfig(), HEAD, 1)
    torch.testing.assert_close(apply_rope(x, rotation_at(table, torch.tensor([0]))), x)


def test_linear_scaling_stretches_positions():
    plain = rope_table(RopeConfig(), HEAD, LENGTH)
    linear = rope_table(RopeConfig(kind="linear", factor=4.0), HEAD, LENGTH)
    torch.testing.assert_close(linear[::4], plain[: LENGTH // 4])
