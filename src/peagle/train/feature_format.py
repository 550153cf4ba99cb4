"""Hidden states on disk: two bytes a number, or one byte and a scale for each slice.

A slice is one token's hidden state at one tapped layer, or its final one.
"""

import torch
from torch import Tensor

from peagle.drafters.network import NetworkConfig
from peagle.train.features import Features
from peagle.train.recipe import FeatureDType

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
LEAST_EXPONENT = -100
"""Least exponent of a scale; smaller values become zero."""
SCALES = ".scales"


def row_bytes(config: NetworkConfig, row_length: int, kind: FeatureDType) -> int:
    """Bytes of one packed row."""
    slices = row_length * (len(config.taps) + 1)
    numbers = slices * config.target_hidden_size
    return 2 * numbers if kind == "bfloat16" else numbers + 4 * slices


def store(features: Features, kind: FeatureDType) -> dict[str, Tensor]:
    """Features as named tensors, [length, ...] each, on the CPU."""
    states = {"tapped": features.tapped, "final": features.final}
    stored: dict[str, Tensor] = {}
    for name, value in states.items():
        if kind == "bfloat16":
            stored[name] = value.bfloat16().cpu()
        else:
            numbers, scales = quantise(value, features.final.shape[-1])
            stored[name], stored[name + SCALES] = numbers.cpu(), scales.cpu()
    return stored


def restore(stored: dict[str, Tensor], dtype: torch.dtype) -> Features:
    """The inverse of `store`, in the dtype to compute with."""
    tapped, final = (
        dequantise(stored[name], stored[name + SCALES], dtype)
        if name + SCALES in stored
        else stored[name].to(dtype)
        for name in ("tapped", "final")
    )
    return Features(tapped, final)


def quantise(states: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """float8 numbers of the same shape, and float32 scales, one for every `width` numbers.

    states: [length, slices * width]; scales: [length, slices]. A scale is a power of two, so that
    a number times its scale is exact in bfloat16; the largest number is between 224 and 448.
    """
    slices = states.float().unflatten(-1, (-1, width))
    exponents = torch.frexp(slices.abs().amax(dim=-1) / LARGEST).exponent
    scales = torch.exp2(exponents.clamp(min=LEAST_EXPONENT).float())
    return (slices / scales[..., None]).to(FLOAT8).flatten(-2), scales


def dequantise(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[length, slices * width] numbers and [length, slices] scales -> states."""
    slices = numbers.to(dtype).unflatten(-1, (scales.shape[-1], -1))
    return slices.mul_(scales.to(dtype)[..., None]).flatten(-2)
