"""Products in FP8 on both sides: many rows, with weights whose checkpoint is made for it."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from peagle.ops.linear import Linear
from peagle.ops.products.cublas import CuBLAS
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Epilogue
from peagle.ops.quantized_activations import quantize
from peagle.ops.triton import on_hopper
from peagle.ops.weight import FP8, QuantizedWeight

BLOCKWISE = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
ROWWISE = ScalingType.RowWise, ScalingType.RowWise
BLOCK = 128
"""Inputs, and outputs, of the blocks that cuBLAS scales."""
STEP = 4 * BLOCK
"""Depth, where blocks share scales: those of four blocks are read at once."""
MOST_EXACT = 64
"""Rows up to which inputs stay in 16 bits: weights are read faster than they are multiplied. With
96 such inputs take 1.5 to 2 times as long on an H200, with 64 about as long."""


class QuantizedActivations(CuBLAS):
    """W8A8: the one exception to inputs in 16 bits."""

    def takes(self, x: Normed, layer: Linear, epilogue: Epilogue) -> bool:
        weight = layer.weight
        if not isinstance(weight, QuantizedWeight) or len(x.x) <= MOST_EXACT:
            return False
        if not weight.dynamic_activations or x.squares is not None or not covers(weight):
            return False
        return x.x.dtype == torch.bfloat16 and on_hopper(x.x)

    def linear(self, x: Normed, layer: Linear) -> Tensor:
        weight, rows = layer.weight, len(x.x)
        assert isinstance(weight, QuantizedWeight)
        blocks = weight.block[0] > 1
        inputs = quantize(x.x, BLOCK if blocks else x.x.shape[1], weight.run)
        recipes = BLOCKWISE if blocks else ROWWISE
        product = F.scaled_mm(
            inputs.numbers,
            weight.numbers.view(inputs.numbers.dtype).T,
            inputs.scales,
            recipes[0],
            weight.scales.T,
            recipes[1],
            output_dtype=x.x.dtype,
        )[:rows]
        return product if layer.bias is None else product + layer.bias


def covers(weight: QuantizedWeight) -> bool:
    """Whether cuBLAS multiplies such blocks."""
    outputs, depth = weight.shape
    if weight.format != FP8 or outputs % 16 or depth % weight.run:
        return False
    return weight.block == (1, depth) or (weight.block == (BLOCK, BLOCK) and depth % STEP == 0)
