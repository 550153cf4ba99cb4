"""What a product is computed together with: it decides on the kernel, too."""

from enum import StrEnum


class Epilogue(StrEnum):
    """What follows a product in the same call."""

    NONE = "none"
    GATE = "gate"
    """One half of the outputs gates the other: SwiGLU."""
    GELU_GATE = "gelu gate"
    """The same with GELU, as tanh approximates it: GEGLU."""
    ADD = "add"
    """The product is added to the residual stream, and the sum goes under the next norm."""

    @property
    def gates(self) -> bool:
        """Whether one half of the outputs gates the other."""
        return self in (Epilogue.GATE, Epilogue.GELU_GATE)
