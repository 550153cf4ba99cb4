"""How programs are launched for a product that they have equal shares of."""

from typing import Any

from torch import Tensor

from peagle.ops.triton.fences import fence
from peagle.ops.triton.hopper_product.shape import TileShape
from peagle.ops.triton.product_call import ProductCall

REGISTERS = 128
"""Registers of a thread, at least at the start."""


def launched(kernel: Any, call: ProductCall, shape: TileShape, tiles: int, *inputs: Any) -> Tensor:
    """Fill a call's results, of which the first is returned. inputs: rows, and the weight."""
    # the kernel announces after its wait
    fence()
    kernel[(shape.programs,)](
        *inputs,
        call.squares,
        call.bias,
        call.results(tiles * shape.groups, shape.programs * shape.left),
        len(call.x),
        call.sizes,
        P=shape,
        num_warps=shape.warps,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    return call.out
