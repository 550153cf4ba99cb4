"""Products in torch, on any device: the reference of every other kernel."""

from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm, rms_norm
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Epilogue
from peagle.ops.swiglu import GATES
from peagle.ops.weight import multiply


class Plain:
    """One way to compute a layer's products, each with one of the epilogues: step by step."""

    def takes(self, x: Normed, layer: Linear, epilogue: Epilogue) -> bool:
        """On a GPU: whether it covers this product and is worth it. Arguments as below."""
        return True

    def linear(self, x: Normed, layer: Linear) -> Tensor:
        """`x @ weight.T + bias`: [rows, out_features]."""
        if x.squares is None:
            return layer(x.x)
        product = multiply(x.x, layer.weight)
        product = (product * x.scale()).to(product.dtype)
        return product if layer.bias is None else product + layer.bias

    def gated(self, x: Normed, layer: Linear, gate: Epilogue) -> Tensor:
        """silu(gate) * up of the product's two halves, or gelu's: [rows, out_features / 2]."""
        return GATES[gate](self.linear(x, layer))

    def add(self, x: Normed, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
        """`stream + x @ weight.T + bias` [rows, out_features], and the same under the next norm."""
        total = stream + self.linear(x, layer)
        return total, Normed(rms_norm(total, norm.weight, norm.eps), None, norm.eps)
