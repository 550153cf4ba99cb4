"""Rotary position embedding and its scalings."""

from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """How some rows are rotated."""

    cosine: Tensor
    """[rows, 1, width] of the lanes that turn."""
    sine: Tensor
    """The same of sines, the first half negated."""
    query_scale: Tensor | None = None
    """[rows, 1, 1] what queries are multiplied by; None: nothing."""


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotary embedding, as Hugging Face's `rope_parameters` give them."""

    theta: float = 10000.0
    kind: str = "default"
    """default, linear, llama3, yarn, longrope, proportional, or none: heads stay as they are, and
    such layers are told no positions (NoPE)."""
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    """The share of a head that turns: its first lanes; of proportional its first pairs of lanes,
    each half a head apart. The others stay as they are."""
    short_factor: tuple[float, ...] = ()
    """What longrope stretches each pair's wave by, up to `original_max_position` positions in
    all."""
    long_factor: tuple[float, ...] = ()
    """The same of longer contexts."""
    llama_4_scaling_beta: float = 0.0
    """How much queries grow at each multiple of `original_max_position`; 0: not at all."""

    def width(self, head_dim: int) -> int:
        """Lanes of a head that turn, or may."""
        whole = self.kind == "proportional"
        return head_dim if whole else int(head_dim * self.partial_rotary_factor)


NOPE = RopeConfig(kind="none")
"""No rotation."""


def rope_table(config: RopeConfig, head_dim: int, length: int) -> Tensor:
    """Cosines and signed sines of every position: [length, 2, width] in float32.

    width: lanes of a head that turn. The sine's first half is negated, so that rotation needs no
    negation of its own.
    """
    frequencies, scale = _frequencies(config, head_dim, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), frequencies)
    cosine, sine = angles.cos() * scale, angles.sin() * scale
    return torch.stack((torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)), dim=1)


def query_scales(config: RopeConfig, length: int) -> Tensor | None:
    """What queries at every position are multiplied by: [length] in float32; None: nothing."""
    if not config.llama_4_scaling_beta:
        return None
    steps = torch.arange(length, device="cpu") // config.original_max_position
    return 1 + config.llama_4_scaling_beta * torch.log1p(steps.float())


def rotation_at(table: Tensor, positions: Tensor, scales: Tensor | None = None) -> Rotation:
    """The rows of a `rope_table` at some positions [rows]. scales: of `query_scales`."""
    cosine, sine = table.index_select(0, positions).split(1, dim=1)
    scale = None if scales is None else scales.index_select(0, positions)[:, None, None]
    return Rotation(cosine, sine, scale)


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the halves of each head's lanes that turn. x: [rows, heads, head_dim]."""
    width = rotation.cosine.shape[-1]
    if width == x.shape[-1]:
        return _rotated(x, rotation)
    turned, still = x.tensor_split((width,), dim=-1)
    return torch.cat((_rotated(turned, rotation), still), dim=-1)


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    return torch.addcmul(x * rotation.cosine, x.roll(x.shape[-1] // 2, -1), rotation.sine)


def _frequencies(config: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Angle per position of each pair of lanes that turn; a factor on cos and sin.

    length: of the longest context. Scalings are those of transformers, which read a model's config
    and are imported only where there is one.
    """
    with torch.device("cpu"):
        if config.kind in ("default", "none"):
            width = config.width(head_dim)
            plain = 1.0 / config.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
            return torch.zeros_like(plain) if config.kind == "none" else plain, 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        first = config.original_max_position
        named = {"rope_theta": config.theta, "original_max_position_embeddings": first}
        read = SimpleNamespace(
            rope_parameters={**asdict(config), **named},
            hidden_size=head_dim,
            num_attention_heads=1,
            standardize_rope_params=lambda: None,
        )
        return ROPE_INIT_FUNCTIONS[config.kind](read, torch.device("cpu"), length)
