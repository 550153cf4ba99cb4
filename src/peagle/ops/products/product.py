"""What a product is, whoever computes it: the key for choosing a kernel."""

from dataclasses import dataclass
from enum import StrEnum

DENSE = ("bfloat16", "float16", "float32")
"""Formats of weights that are tensors."""


class Epilogue(StrEnum):
    """What follows a product in the same call."""

    NONE = "none"
    GATE = "gate"
    """One half of the outputs gates the other: SwiGLU."""
    ADD = "add"
    """The product is added to the residual stream, and the sum goes under the next norm."""


@dataclass(frozen=True)
class Product:
    """[rows, depth] times a weight [outputs, depth], and what follows."""

    rows: int
    depth: int
    format: str
    """The format of the weight, as `peagle.ops.weight.format_of` names it."""
    epilogue: Epilogue = Epilogue.NONE

    @property
    def gated(self) -> bool:
        """Whether one half of the outputs gates the other."""
        return self.epilogue is Epilogue.GATE

    @property
    def dense(self) -> bool:
        """Whether the weight is a plain tensor."""
        return self.format in DENSE
