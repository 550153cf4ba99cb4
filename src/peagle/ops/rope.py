"""Rotary position embedding and its scalings."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of some rows, each [rows, 1, head_dim]."""


@dataclass(frozen=True)
class RopeConfig:
    """Base and scaling of the rotary embedding, as Hugging Face's `rope_parameters` give them."""

    theta: float = 10000.0
    kind: str = "default"
    """default, linear, llama3, yarn or proportional."""
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    """Of proportional: the share of a head's pairs that turn; the last ones stay as they are."""


def rope_table(config: RopeConfig, head_dim: int, length: int) -> Tensor:
    """Cosines and signed sines of every position: [length, 2, head_dim] in float32.

    The sine's first half is negated, so that rotation needs no negation of its own.
    """
    frequencies, scale = _frequencies(config, head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), frequencies)
    cosine, sine = angles.cos() * scale, angles.sin() * scale
    return torch.stack((torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)), dim=1)


def rotation_at(table: Tensor, positions: Tensor) -> Rotation:
    """The rows of a `rope_table` at some positions [rows]."""
    cosine, sine = table.index_select(0, positions).split(1, dim=1)
    return cosine, sine


def apply_rope(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the halves of each head. x: [rows, heads, head_dim]."""
    cosine, sine = rotation
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine)


def _frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair of dimensions [head_dim / 2]; a factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "yarn":
        return _yarn(config, plain, head_dim)
    if config.kind == "proportional":
        return _proportional(config, plain, head_dim), 1.0
    return plain, 1.0


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


def _proportional(config: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """Gemma 4's rule: frequencies of the whole head, of which only the first ones are kept."""
    turning = int(config.partial_rotary_factor * head_dim // 2)
    kept = torch.arange(head_dim // 2, device="cpu") < turning
    return torch.where(kept, plain / config.factor, 0.0)
