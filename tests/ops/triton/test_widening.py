"""What moves bits in a GPU's registers, carried out here: the interpreter runs none of it."""

import inspect
import re

import pytest
import torch
from torch import Tensor

from peagle.ops.triton import widening
from peagle.ops.weight import FP8, INT4, INT8, MXFP4

CODES = torch.arange(1 << 16)
"""All that 16 bits can hold."""
MASK = (1 << 32) - 1


def both(halves: Tensor) -> Tensor:
    """The same 16 bits twice in 32."""
    return halves | halves << 16


def bits(value: float | Tensor) -> Tensor:
    """Of a number as bfloat16."""
    number = torch.as_tensor(value, dtype=torch.bfloat16)
    return number.view(torch.int16).long() & 0xFFFF


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Two bfloat16 numbers at a time; the sums here need no more bits than float64 has."""
    halves = []
    for shift in (0, 16):
        x, y, z = (
            (each >> shift & 0xFFFF).to(torch.int16).view(torch.bfloat16).double()
            for each in torch.broadcast_tensors(a, b, c)
        )
        halves.append(bits((x * y + z).to(torch.bfloat16)))
    return halves[0] | halves[1] << 16


def chosen(word: Tensor, places: int) -> Tensor:
    """The bytes of eight at four places, the lowest place first."""
    each = ((word >> 8 * (places >> 4 * i & 7) & 255) << 8 * i for i in range(4))
    return sum(each, torch.zeros_like(word))


def run(function: object, *operands: Tensor) -> list[Tensor]:
    """The results of a function's instructions, given what stands after them."""
    function = getattr(function, "fn", function)
    source = inspect.getsource(function)
    text, named = re.search(
        r'inline_asm_elementwise\(\s*(?:"""(.*?)"""|(\w+))', source, re.S
    ).groups()
    text = text or function.__globals__[named].value
    results = re.search(r'"((?:=r,)+)', source)[1].count("=r")
    held = {f"${results + i}": operand for i, operand in enumerate(operands)}

    def value(name: str) -> Tensor:
        return held[name] if name in held else torch.tensor(int(name, 0))

    for name, operands_of in re.findall(r"^\s*([a-z]\S*) (.*);$", text, re.M):
        into, *given = operands_of.split(", ")
        a, *rest = map(value, given)
        held[into] = {
            "mov": lambda a, rest: a,
            "and": lambda a, rest: a & rest[0],
            "or": lambda a, rest: a | rest[0],
            "shl": lambda a, rest: a << rest[0] & MASK,
            "shr": lambda a, rest: a >> rest[0],
            "lop3": lambda a, rest: a & rest[0] | rest[1],  # 0xEA, the one that is used
            "fma": lambda a, rest: fma(a, *rest),
            "prmt": lambda a, rest: chosen(a | rest[0] << 32, int(rest[1])),
        }[name.partition(".")[0]](a, rest)
    return [held[f"${i}"] for i in range(results)]


def numbers(found: Tensor) -> Tensor:
    """Those of both halves, which must be the same."""
    assert torch.equal(found & 0xFFFF, found >> 16)
    return (found & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()


def lower_and_upper(codes: Tensor) -> list[Tensor]:
    return [(codes >> shift & 255).to(torch.uint8) for shift in (0, 8)]


@pytest.mark.parametrize(("function", "form"), [("e4m3", FP8), ("integers8", INT8)])
def test_every_pair_of_bytes(function: str, form):
    for found, codes in zip(
        run(getattr(widening, function), both(CODES)), lower_and_upper(CODES), strict=True
    ):
        wanted, real = form.values(codes), numbers(found)
        there = wanted.isfinite()
        assert torch.equal(real[there], wanted[there])


@pytest.mark.parametrize("zero", [0, 7, 8, 15])
def test_every_four_codes_of_integers(zero: int):
    less = both(bits(-128.0 - zero))
    found = run(widening.integers4, both(CODES), less, less, less, less)
    for place, each in enumerate(found):
        assert torch.equal(numbers(each), (CODES >> 4 * place & 15).float() - zero)
    assert INT4.values(torch.tensor([15], dtype=torch.uint8)).item() == 7  # as with 8


def test_every_scale_of_nvfp4():
    """Four of them, each another one, in 32 bits."""
    codes = [torch.arange(0x7F).roll(shift) for shift in range(4)]
    word = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24
    found = run(widening.scales_e4m3, word)
    halves = [each >> shift & 0xFFFF for each in found for shift in (0, 16)]
    for half, code in zip(halves, codes, strict=True):
        wanted = code.to(torch.uint8).view(torch.float8_e4m3fn).double() * 2.0**63
        assert torch.equal(half.to(torch.int16).view(torch.bfloat16).double(), wanted)


def test_every_four_codes_of_e2m1():
    """With scales of NVFP4 and of MXFP4, each number's own."""
    scales = torch.tensor([2.0**-6, 1.75, 448.0, 2.0**-9])
    of_each = [both(bits(scale * 2.0**63)) for scale in scales]
    stored = CODES.to(torch.int16).view(torch.uint8).unflatten(0, (-1, 2))
    codes = MXFP4.codes(stored.unsqueeze(1).expand(-1, 16, 2).reshape(-1, 32), 64)
    wanted = MXFP4.values(codes).unflatten(1, (4, 16))[:, :, 0]
    found = run(widening.e2m1, both(CODES), *of_each)
    for place, (each, scale) in enumerate(zip(found, scales, strict=True)):
        real = numbers(each).double() * 2.0**63
        assert torch.equal(real, wanted[:, place].double() * scale)
