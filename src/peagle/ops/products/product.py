"""What a product is computed together with: it decides on the kernel, too."""

from enum import StrEnum


class Epilogue(StrEnum):
    """What follows a product in the same call."""

    NONE = "none"
    GATE = "gate"
    """One half of the outputs gates the other: SwiGLU."""
    ADD = "add"
    """The product is added to the residual stream, and the sum goes under the next norm."""
