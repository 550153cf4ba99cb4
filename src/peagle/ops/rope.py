"""Rotary position embedding and its scalings."""

import math
from dataclasses import dataclass
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
    frequencies, scale = _frequencies(config, config.width(head_dim), length)
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
    """Angle per position of each pair of dimensions [head_dim / 2]; a factor on cos and sin.

    length: of the longest context.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "yarn":
        return _yarn(config, plain, head_dim)
    if config.kind == "longrope":
        return _longrope(config, plain, length)
    if config.kind == "proportional":
        return _proportional(config, plain, head_dim), 1.0
    return torch.zeros_like(plain) if config.kind == "none" else plain, 1.0


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1's rule: long waves are stretched, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    low = config.original_max_position / config.low_freq_factor
    high = config.original_max_position / config.high_freq_factor
    smooth = config.original_max_position / wavelength - config.low_freq_factor
    smooth = smooth / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - smooth) * plain / config.factor + smooth * plain
    stretched = torch.where(wavelength > low, plain / config.factor, plain)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, stretched)


def _yarn(config: RopeConfig, plain: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp between kept and stretched frequencies, and a temperature."""

    def dimension(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low
    ramp /= (high - low) or 0.001
    stretched = ramp.clamp(0, 1)
    frequencies = plain / config.factor * stretched + plain * (1 - stretched)
    scale = config.attention_factor
    if scale is None:
        scale = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
    return frequencies, scale


def _longrope(config: RopeConfig, plain: Tensor, length: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): each pair has a factor of its own, learned for contexts up to
    the original's length and for longer ones."""
    original = config.original_max_position
    factors = config.long_factor if length > original else config.short_factor
    scale = config.attention_factor
    if scale is None:
        grown = math.log(config.factor) / math.log(original) if config.factor > 1 else 0.0
        scale = math.sqrt(1 + grown)
    return plain / torch.tensor(factors, device="cpu"), scale


def _proportional(config: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """Gemma 4's rule: frequencies of the whole head, of which only the first ones are kept."""
    turning = int(config.partial_rotary_factor * head_dim // 2)
    kept = torch.arange(head_dim // 2, device="cpu") < turning
    return torch.where(kept, plain / config.factor, 0.0)
