"""Products of many rows with packed weights: arithmetic takes longer than to widen them first."""

import torch
from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.products.cublas import CuBLAS
from peagle.ops.products.few_rows import covers
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Epilogue
from peagle.ops.triton import kernels
from peagle.ops.weight import FP8, QuantizedWeight

FEW = 512
"""Rows up to which weights are widened in registers, again for each tile of rows."""
STRIP, ALIGNED = 1 << 26, 256
"""Most numbers that are widened at a time: few enough for the memory beside a pass, and as many
outputs as keep a GPU busy in one product. Each strip but the last is a multiple of so many outputs:
it begins at whole 16 bytes of the result, as cuBLAS's fast kernels want."""


class Widened(CuBLAS):
    """Weights of few bits, by cuBLAS."""

    def takes(self, x: Normed, layer: Linear, epilogue: Epilogue) -> bool:
        weight = layer.weight
        if not isinstance(weight, QuantizedWeight):
            return False
        # of eight bits only whole runs lie as the kernel reads them
        whole = weight.format.bits == 4 or weight.shape[-1] % weight.run == 0
        return len(x.x) > FEW and whole and (weight.format != FP8 or covers(weight))

    def linear(self, x: Normed, layer: Linear) -> Tensor:
        weight, (outputs, depth) = layer.weight, layer.weight.shape
        out = x.x.new_empty(len(x.x), outputs)
        step = max(STRIP // depth // ALIGNED, 1) * ALIGNED
        for start in range(0, outputs, step):
            rows = slice(start, min(start + step, outputs))
            strip = kernels("widened").widened(weight, rows, x.x.dtype)
            torch.mm(x.x, strip.t(), out=out[:, rows])
        if x.squares is not None:
            out = (out * x.scale()).to(out.dtype)
        return out if layer.bias is None else out + layer.bias
