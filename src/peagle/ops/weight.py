"""A weight has a format: a tensor of numbers, or numbers of few bits that share scales.

To add a format, write a `QuantizedWeight` here, what of a file is read as one in
`peagle.models.quantization`, and kernels for it in `peagle.ops.products` and `peagle.ops.triton`
(`docs/formats.md`).
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.errors import InputError

STRIP = 1 << 22
"""Numbers that are dequantised at a time, beside the result."""
E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = torch.finfo(E4M3).max
LEAST_AMAX = 1e-12
"""What counts as the largest of numbers that are all zero."""
LARGEST_SCALE = 127 + 64
"""Of MXFP4, as it is kept: 2 to the power of 64, what kernels have room for. 255 is NaN."""
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

    A scale for each output is a block one high and as wide as the depth. Of a run of 128 inputs the
    first and the 65th lie side by side, the second and the 66th, and so on: a kernel multiplies the
    lower bytes of 16 bits by 64 neighbours of its input, and the upper ones by the next 64. Runs
    have 64 inputs where a block or the depth does not hold whole runs of 128. The depth is filled
    up to whole runs by zeros.
    """

    format = "fp8"

    def __init__(
        self,
        shape: tuple[int, ...],
        numbers: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        dynamic_activations: bool = False,
    ) -> None:
        """As `of` makes it."""
        super().__init__(shape, numbers, scales)
        self.block, self.dynamic_activations = block, dynamic_activations

    @classmethod
    def of(
        cls,
        values: Tensor,
        factors: Tensor,
        block: tuple[int, int],
        dynamic_activations: bool = False,
    ) -> Self:
        """From float8_e4m3fn [..., outputs, depth] and float32 [..., blocks, blocks].

        block: its outputs and inputs. The last ones may be smaller. dynamic_activations: whether
        products of many rows may round their inputs to FP8, too, with scales found as they come.
        """
        shape = tuple(values.shape)
        run = run_of(shape[-1], block)
        numbers = F.pad(values.view(torch.uint8), (0, -shape[-1] % run))
        numbers = cls.ordered(numbers, run)
        return cls(shape, numbers, factors.contiguous(), block, dynamic_activations)

    @property
    def run(self) -> int:
        """Inputs of a run."""
        return run_of(self.shape[-1], self.block)

    @staticmethod
    def ordered(inputs: Tensor, run: int) -> Tensor:
        """Whole runs of inputs [..., depth] in the order in which the numbers for them lie."""
        return inputs.unflatten(-1, (-1, 2, run // 2)).transpose(-1, -2).contiguous().flatten(-3)

    def __getitem__(self, index: int) -> "Fp8Weight":
        own = self.numbers[index], self.factors[index]
        return Fp8Weight(self.shape[1:], *own, self.block, self.dynamic_activations)

    @property
    def values(self) -> Tensor:
        """A copy of the numbers without their scales: float8_e4m3fn, of the weight's shape."""
        pairs = self.numbers.unflatten(-1, (-1, self.run // 2, 2)).transpose(-1, -2)
        numbers = pairs.flatten(-3)[..., : self.shape[-1]].contiguous()
        return numbers.view(E4M3)

    @property
    def factors(self) -> Tensor:
        """The scales: float32 [..., blocks of outputs, blocks of inputs]."""
        return self.scales.view(torch.float32)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        result = torch.empty(self.shape, dtype=dtype, device=self.device)
        if len(self.shape) == 3:
            for index in range(len(self)):
                result[index] = self[index].dense(dtype)
            return result
        (high, wide), (outputs, depth), values = self.block, self.shape, self.values
        step = max(STRIP // depth // high, 1) * high
        for start in range(0, outputs, step):
            rows = slice(start, min(start + step, outputs))
            factors = self.factors[start // high : -(-rows.stop // high)]
            factors = factors.repeat_interleave(high, 0)[: rows.stop - start]
            factors = factors.repeat_interleave(wide, 1)[:, :depth]
            result[rows] = values[rows].float() * factors
        return result


def run_of(depth: int, block: tuple[int, int]) -> int:
    """Inputs of a run of `Fp8Weight`."""
    return 64 if depth % 128 or (block[1] < depth and block[1] % 128) else 128


def fp8(weight: Tensor) -> Fp8Weight:
    """A weight [outputs, depth] rounded to E4M3, with a scale for each output."""
    values = weight.detach().float()
    scales = values.abs().amax(dim=1, keepdim=True).clamp(min=LEAST_AMAX) / LARGEST_E4M3
    numbers = (values / scales).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
    return Fp8Weight.of(numbers, scales, (1, weight.shape[1]))


class Mxfp4Weight(QuantizedWeight):
    """MXFP4 (OCP Microscaling Formats 1.0): 32 E2M1 numbers of an output share a power of two.

    Of a run of 64 inputs 16 bits have four numbers that are 16 apart, as `_orders` says: a kernel
    multiplies those that lie alike by 16 neighbours of its input. The depth is filled up to whole
    runs by zeros. `scales` are exponents + 127, for each output a multiple of 16, as many as a
    kernel may read in a step.
    """

    format = "mxfp4"
    block = 32
    run = 64

    @classmethod
    def of(cls, blocks: Tensor, scales: Tensor) -> Self:
        """From bytes [..., outputs, depth / 32, 16], each with the first of two neighbours in its
        low bits, and scales [..., outputs, depth / 32].

        Raises `InputError` for a scale that is NaN or too large.
        """
        if bool((scales > LARGEST_SCALE).any()):
            raise InputError("MXFP4 weights hold scales that are NaN or above 2**64")
        *leading, outputs, count = scales.shape
        width = -(-count // 2) * 32
        numbers = blocks.new_empty(*leading, outputs, width)
        matrices = numbers.view(-1, outputs, width)
        for into, given in zip(matrices, blocks.reshape(-1, outputs, count, 16), strict=True):
            codes = torch.stack((given & 15, given >> 4), dim=-1).flatten(1)
            codes = F.pad(codes, (0, -codes.shape[1] % cls.run)).view(outputs, -1, 4, 16)
            into.copy_(_ordered(codes).view(torch.uint8).view(outputs, width))
        shape = (*leading, outputs, count * cls.block)
        return cls(shape, numbers, F.pad(scales, (0, -count % 16)).contiguous())

    def blocks(self) -> tuple[Tensor, Tensor]:
        """The inverse of `of`."""
        *leading, outputs, depth = self.shape
        count = depth // self.block
        blocks = self.numbers.new_empty(*leading, outputs, count, 16)
        matrices = self.numbers.view(-1, outputs, self.numbers.shape[-1])
        for into, numbers in zip(blocks.view(-1, outputs, count, 16), matrices, strict=True):
            codes = _codes(numbers)[:, :depth].reshape(outputs, count, 16, 2)
            into.copy_(codes[..., 0] | codes[..., 1] << 4)
        return blocks, self.scales[..., :count].contiguous()

    def __getitem__(self, index: int) -> "Mxfp4Weight":
        return Mxfp4Weight(self.shape[1:], self.numbers[index], self.scales[index])

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        result = torch.empty(self.shape, dtype=dtype, device=self.device)
        known = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)], device=self.device)
        *_, outputs, depth = self.shape
        matrices = result.view(-1, outputs, depth)
        every = self.numbers.view(len(matrices), outputs, -1)
        factors_of = self.scales.view(len(matrices), outputs, -1)
        # one matrix at a time: the intermediates take many times the weight's bytes
        for into, numbers, scales in zip(matrices, every, factors_of, strict=True):
            # the bits of float32's exponent; the least scale, 2**-127, becomes 0
            factors = (scales[:, : depth // self.block].int() << 23).view(torch.float32)
            values = known[_codes(numbers)[:, :depth].int()].view(outputs, -1, self.block)
            into.copy_((values * factors[..., None]).flatten(1))
        return result


@functools.cache
def _orders(device: torch.device) -> tuple[Tensor, Tensor]:
    """Where `Mxfp4Weight` has four codes of four bits in 16, and the inverse: int16 [65536].

    Given by where they lie one after the other, the first lowest. A code's sign and magnitude go to

        15, 8-6     the first: there bfloat16 has its sign, and the lowest bits of its exponent
                    beside the highest of its mantissa
        12, 5-3     the second: by a shift of three
        9, 2-0      the third: by a shift of six
        14, 11-10   the fourth, whose lowest bit is 13: what is left
    """
    given = torch.arange(1 << 16, dtype=torch.int32, device=device)
    codes = [given >> shift & 15 for shift in (0, 4, 8, 12)]
    ordered = torch.zeros_like(given)
    for code, shift in zip(codes, (0, 3, 6), strict=False):
        ordered |= ((code & 8) << 12 | (code & 7) << 6) >> shift
    last = codes[3]
    ordered |= (last & 8) << 11 | (last & 6) << 9 | (last & 1) << 13
    inverse = torch.empty_like(given).scatter_(0, ordered.long(), given)
    return ordered.to(torch.int16), inverse.to(torch.int16)


def _ordered(codes: Tensor) -> Tensor:
    """Codes of four bits [..., 4, 16] as int16 [..., 16], each with four."""
    first, second, third, fourth = codes.int().unbind(-2)
    order, _ = _orders(codes.device)
    return order[first | second << 4 | third << 8 | fourth << 12]


def _codes(numbers: Tensor) -> Tensor:
    """The inverse of `_ordered`, of an output's bytes in a row: uint8 [outputs, inputs]."""
    _, inverse = _orders(numbers.device)
    given = inverse[numbers.view(torch.int16).int() & 0xFFFF].unflatten(-1, (-1, 16))
    codes = torch.stack([given >> shift & 15 for shift in (0, 4, 8, 12)], dim=-2)
    return codes.to(torch.uint8).flatten(-3)


def format_of(weight: Weight) -> str:
    """The name of a weight's format: of a tensor, its dtype's."""
    if isinstance(weight, QuantizedWeight):
        return weight.format
    return str(weight.dtype).removeprefix("torch.")


def dense(weight: Weight) -> Tensor:
    """The numbers of a weight; of one that is quantized in float32."""
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


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


def keep_activations(module: nn.Module) -> None:
    """Let no product of a module round its inputs, whatever its weights are made for."""
    for weight in weights_of(module):
        if isinstance(weight, Fp8Weight):
            weight.dynamic_activations = False


def weights_of(*modules: nn.Module) -> Iterator[Weight]:
    """All parameters and quantized weights of some modules."""
    for module in modules:
        yield from module.parameters()
        yield from (part for part in module.modules() if isinstance(part, QuantizedWeight))
