"""Products by cuBLAS, and what follows each in one launch: best where rows are many."""

from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.products.normed import Normed
from peagle.ops.products.plain import Plain
from peagle.ops.products.product import Epilogue
from peagle.ops.triton import kernels


class CuBLAS(Plain):
    """Every product of a tensor; where it is gated, without a bias."""

    def takes(self, x: Normed, layer: Linear, epilogue: Epilogue) -> bool:
        biased = layer.bias is not None
        return isinstance(layer.weight, Tensor) and not (epilogue.gates and biased)

    def gated(self, x: Normed, layer: Linear, gate: Epilogue) -> Tensor:
        product, fast = self.linear(x, layer), kernels("swiglu")
        return fast.swiglu(product) if gate is Epilogue.GATE else fast.geglu(product)

    def add(self, x: Normed, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
        return kernels("norm").add_normed(self.linear(x, layer)[:, None], stream, norm)
