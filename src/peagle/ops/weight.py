"""A weight has a format: a tensor of numbers, or numbers of few bits that share scales.

To add a format, write a `QuantizedWeight` here, what of a file is read as one in
`peagle.models.quantization`, and kernels for it in `peagle.ops.products` and `peagle.ops.triton`
(`docs/formats.md`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.errors import InputError

STRIP = 1 << 22
"""Numbers that are dequantised at a time, beside the result."""
LARGEST_SCALE = 252
"""Of MXFP4. With a larger one, 6 would exceed float32's range; 255 is NaN."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What E2M1's lower three bits stand for; the fourth is the sign."""


class QuantizedWeight(nn.Module, ABC):
    """A matrix [outputs, depth], or one for each expert, in a format of few bits.

    Its tensors are kept as bytes, so that a module's `to` moves them and casts none.
    """

    format: ClassVar[str]

    def __init__(self, shape: tuple[int, ...], numbers: Tensor, scales: Tensor) -> None:
        """shape: of what is meant; numbers, scales: [..., outputs or fewer, bytes], contiguous."""
        super().__init__()
        self.shape = shape
        self.register_buffer("numbers", numbers.view(torch.uint8), persistent=False)
        self.register_buffer("scales", scales.view(torch.uint8), persistent=False)

    numbers: Tensor
    scales: Tensor

    def __len__(self) -> int:
        """The first size, as of a tensor."""
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.numbers.device

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.numbers.nbytes + self.scales.nbytes

    def numel(self) -> int:
        """How many numbers it stands for."""
        return torch.Size(self.shape).numel()

    @abstractmethod
    def __getitem__(self, index: int) -> Self:
        """One expert's, of the same memory."""

    @abstractmethod
    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers themselves; exact in float32."""


Weight = Tensor | QuantizedWeight


class Fp8Weight(QuantizedWeight):
    """E4M3 numbers in blocks of outputs and inputs that share a float32 scale.

    A scale for each output is a block one high and as wide as the depth.
    """

    format = "fp8"

    def __init__(self, numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
        """numbers: float8_e4m3fn [..., outputs, depth]; scales: float32 [..., blocks, blocks].

        block: its outputs and inputs. The last ones may be smaller.
        """
        super().__init__(tuple(numbers.shape), numbers.contiguous(), scales.contiguous())
        self.block = block

    def __getitem__(self, index: int) -> "Fp8Weight":
        return Fp8Weight(self.values[index], self.factors[index], self.block)

    @property
    def values(self) -> Tensor:
        """The numbers without their scales: float8_e4m3fn, of the weight's shape."""
        return self.numbers.view(torch.float8_e4m3fn)

    @property
    def factors(self) -> Tensor:
        """The scales: float32 [..., blocks of outputs, blocks of inputs]."""
        return self.scales.view(torch.float32)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        result = torch.empty(self.shape, dtype=dtype, device=self.device)
        if self.values.ndim == 3:
            for index in range(len(self)):
                result[index] = self[index].dense(dtype)
            return result
        (high, wide), (outputs, depth) = self.block, self.shape
        step = max(STRIP // depth // high, 1) * high
        for start in range(0, outputs, step):
            rows = slice(start, min(start + step, outputs))
            factors = self.factors[start // high : -(-rows.stop // high)]
            factors = factors.repeat_interleave(high, 0)[: rows.stop - start]
            factors = factors.repeat_interleave(wide, 1)[:, :depth]
            result[rows] = self.values[rows].float() * factors
        return result


def fp8(weight: Tensor) -> Fp8Weight:
    """A weight [outputs, depth] rounded to E4M3, with a scale for each output."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    values = weight.detach().float()
    scales = values.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest
    numbers = (values / scales).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return Fp8Weight(numbers, scales, (1, weight.shape[1]))


class Mxfp4Weight(QuantizedWeight):
    """MXFP4 (OCP Microscaling Formats 1.0): 32 E2M1 numbers share a power of two.

    A byte of `numbers` has a number of one block and the number at the same place of the next:

        columns of the weight   0 1 2 ... 31 | 32 33 34 ... 63 | 64 ...
        low bits of bytes       0 1 2 ... 31 |                 | 32 ...
        high bits of bytes                   |  0  1  2 ... 31 |

    so that a kernel multiplies low and high bits by runs of 32 columns of its input each. The depth
    is filled up to a multiple of 64 by zeros. `scales` are exponents + 127.
    """

    format = "mxfp4"
    block = 32

    @classmethod
    def of(cls, blocks: Tensor, scales: Tensor) -> Self:
        """From bytes [..., outputs, depth / 32, 16], each with the first of two neighbours in its
        low bits, and scales [..., outputs, depth / 32].

        Raises `InputError` for a scale that is NaN or too large.
        """
        if bool((scales > LARGEST_SCALE).any()):
            raise InputError("MXFP4 weights hold NaN or infinite values")
        *leading, outputs, count = scales.shape
        odd = count % 2
        numbers = blocks.new_zeros(*leading, outputs, (count + odd) // 2, cls.block)
        matrices = numbers.view(-1, *numbers.shape[-3:])
        for into, given in zip(matrices, blocks.reshape(-1, *blocks.shape[-3:]), strict=True):
            values = torch.stack((given & 15, given >> 4), dim=-1).flatten(-2)
            pairs = F.pad(values, (0, 0, 0, odd)).unflatten(1, (-1, 2))
            into.copy_(pairs[:, :, 0] | pairs[:, :, 1] << 4)
        shape = (*leading, outputs, count * cls.block)
        return cls(shape, numbers.flatten(-2), F.pad(scales, (0, odd)).contiguous())

    def blocks(self) -> tuple[Tensor, Tensor]:
        """The inverse of `of`."""
        *leading, outputs, depth = self.shape
        count = depth // self.block
        pairs = self.numbers.view(*leading, outputs, -1, self.block)
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)[..., :count, :]
        blocks = codes[..., ::2] | codes[..., 1::2] << 4
        return blocks, self.scales[..., :count].contiguous()

    def __getitem__(self, index: int) -> "Mxfp4Weight":
        return Mxfp4Weight(self.shape[1:], self.numbers[index], self.scales[index])

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        result = torch.empty(self.shape, dtype=dtype, device=self.device)
        known = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)], device=self.device)
        depth = self.shape[-1]
        # one matrix at a time: the intermediates take many times the weight's bytes
        outputs = self.shape[-2]
        matrices = result.view(-1, outputs, depth)
        numbers = self.numbers.view(len(matrices), outputs, -1, self.block)
        every = self.scales.view(len(matrices), outputs, -1)
        for into, pairs, scales in zip(matrices, numbers, every, strict=True):
            codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1, 2)
            # the bits of float32's exponent; the least scale, 2**-127, becomes 0
            factors = (scales.int() << 23).view(torch.float32)
            into.copy_((known[codes.int()] * factors[..., None]).flatten(1)[:, :depth])
        return result


def format_of(weight: Weight) -> str:
    """The name of a weight's format: of a tensor, its dtype's."""
    if isinstance(weight, QuantizedWeight):
        return weight.format
    return str(weight.dtype).removeprefix("torch.")


def dense(weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers of a weight, in a dtype or, of a tensor, in its own."""
    if isinstance(weight, QuantizedWeight):
        return weight.dense(dtype or torch.float32)
    return weight if dtype is None else weight.to(dtype)


def multiply(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, in float32 where the weight is quantized: it loses nothing there."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), weight.dense(), wide).to(x.dtype)


def replace_weight(module: nn.Module, name: str, weight: nn.Parameter | QuantizedWeight) -> None:
    """Put a weight in the place of a parameter, `name` within the module."""
    owner, _, own = name.rpartition(".")
    part = module.get_submodule(owner)
    delattr(part, own)
    setattr(part, own, weight)


def weight_at(module: nn.Module, name: str) -> Weight:
    """The weight that a module has under a name."""
    owner, _, own = name.rpartition(".")
    weight = getattr(module.get_submodule(owner), own)
    assert isinstance(weight, Weight)
    return weight


def weights_of(*modules: nn.Module) -> Iterator[Weight]:
    """All parameters and quantized weights of some modules."""
    for module in modules:
        yield from module.parameters()
        yield from (part for part in module.modules() if isinstance(part, QuantizedWeight))
