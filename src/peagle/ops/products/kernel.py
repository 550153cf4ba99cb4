"""What every kernel of products has."""

from abc import ABC, abstractmethod

from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Product


class Kernel(ABC):
    """One way to compute a layer's products, each with one of the epilogues."""

    @abstractmethod
    def takes(self, product: Product, x: Normed, layer: Linear) -> bool:
        """On a GPU: whether it covers this product and is worth it. Arguments as below."""

    @abstractmethod
    def linear(self, x: Normed, layer: Linear) -> Tensor:
        """`x @ weight.T + bias`: [rows, out_features]."""

    @abstractmethod
    def gated(self, x: Normed, layer: Linear) -> Tensor:
        """silu(gate) * up of the product's two halves: [rows, out_features / 2]."""

    @abstractmethod
    def add(self, x: Normed, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
        """`stream + x @ weight.T + bias` [rows, out_features], and the same under the next norm."""
