"""Matrix products with few rows, the shape of decoding."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from peagle.ops.packing import Packable
from peagle.ops.products.packed import packed_product
from peagle.ops.weight import QuantizedWeight, Weight, fp8, multiply, replace_weight


class Linear(Packable):
    """`x @ weight.T + bias`. After `pack()` a CPU uses a weight laid out for few rows.

    packed: what computes in place of torch's product; a trainer's optimizer puts its own there.
    batch_invariant: on a GPU, whether a row's product must not depend on the number of rows.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: Weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.packed: Callable[[Tensor], Tensor] | None = None
        self.batch_invariant = False

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias) if self.packed is None else self.packed(x)

    def quantized(self) -> "Linear":
        """The same product with a weight rounded to FP8, with a scale for each output.

        A weight that is in few bits already stays as it is.
        """
        if isinstance(self.weight, QuantizedWeight):
            return self
        weight = fp8(self.weight)
        with torch.device("meta"):
            other = Linear(weight.shape[1], weight.shape[0])
        replace_weight(other, "weight", weight)
        other.bias = self.bias
        return other

    def pack(self) -> None:
        """Lay the weight out for inference on a CPU, once, where this torch build can."""
        own = self.weight
        if self.packed is None and isinstance(own, Tensor) and own.device.type == "cpu":
            bias = None if self.bias is None else self.bias.detach()
            self.packed = packed_product(own.detach(), bias)
