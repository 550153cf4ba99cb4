"""Matrix products with few rows, the shape of decoding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.ops.packing import Packable

PACKED_ROWS = 32
"""Above this many rows a packed product wins nothing over the plain one."""


class Linear(Packable):
    """`x @ weight.T + bias`. After `pack()` small inputs on a CPU use a weight laid out for them.

    Measured on two cores, float32, 320 -> 1792: 8 rows take 87 us plain and 50 us packed, one row
    46 us either way; bfloat16: 66 us plain and 41 us packed. So verifying K + 1 tokens costs hardly
    more than one token.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None or x.shape[0] > PACKED_ROWS:
            return F.linear(x, self.weight, self.bias)
        if x.dtype == torch.float32:
            return torch.ops.mkl._mkl_linear(x, self.packed, self.weight, self.bias, x.shape[0])
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def pack(self) -> None:
        """Lay the weight out for inference on a CPU, where this torch build can."""
        weight = self.weight.detach()
        if weight.device.type != "cpu":
            return
        if weight.dtype == torch.float32 and torch.backends.mkl.is_available():
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_ROWS)
        elif weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
