"""Numbers of 8 and 4 bits become bfloat16 in registers, which holds all formats exactly.

Instructions that convert take 16 numbers a cycle and multiprocessor: memory brings them faster. So
bits are moved instead, two numbers an instruction: exponent and mantissa to where bfloat16 has the
lowest bits of its exponent and its mantissa. One product with a power of two then sets exponents
right, those of subnormal numbers too. NaN, which no weight holds, would become a number.

To the product -0 is added, which changes nothing: before Hopper no instruction multiplies alone.
"""

import triton
import triton.language as tl


def _asm(registers: str, *lines: str) -> tl.constexpr:
    """Instructions for 32 bits of a thread: two words of packed numbers, or four scales."""
    declared = f".reg .b32 {registers}, zero;", "mov.b32 zero, 0x80008000;"
    return tl.constexpr("\n".join(("{", *declared, *lines, "}")))


OF_E4M3 = _asm(
    "lower, rest, power",
    "mov.b32 power, 0x7B807B80;",
    "shl.b32 lower, $2, 8;",
    "shl.b32 rest, $2, 4;",
    "and.b32 rest, rest, 0x07F007F0;",
    "lop3.b32 lower, lower, 0x80008000, rest, 0xEA;",
    "fma.rn.bf16x2 $0, lower, power, zero;",
    "shr.u32 rest, $2, 4;",
    "and.b32 rest, rest, 0x07F007F0;",
    "lop3.b32 rest, $2, 0x80008000, rest, 0xEA;",
    "fma.rn.bf16x2 $1, rest, power, zero;",
)
OF_E2M1 = _asm(
    "bits, rest",
    *(
        f"shl.b32 bits, $4, {3 * place};\n"
        "and.b32 bits, bits, 0x81C081C0;\n"
        f"fma.rn.bf16x2 ${place}, bits, ${5 + place}, zero;"
        for place in range(3)
    ),
    "shl.b32 bits, $4, 1;",
    "and.b32 bits, bits, 0x80008000;",
    "shr.u32 rest, $4, 3;",
    "lop3.b32 bits, rest, 0x01800180, bits, 0xEA;",
    "shr.u32 rest, $4, 7;",
    "lop3.b32 bits, rest, 0x00400040, bits, 0xEA;",
    "fma.rn.bf16x2 $3, bits, $8, zero;",
)
# `prmt` makes 16 bits of each byte; 0x7B80 is 2 to the power of 120, and 0x5F00 is `SHIFT`
OF_SCALES = _asm(
    "bits, power, shift",
    "mov.b32 power, 0x7B807B80;",
    "mov.b32 shift, 0x5F005F00;",
    *(
        f"prmt.b32 bits, $2, 0, {bytes_of};\n"
        "shl.b32 bits, bits, 4;\n"
        "fma.rn.bf16x2 bits, bits, power, zero;\n"
        f"fma.rn.bf16x2 ${place}, bits, shift, zero;"
        for place, bytes_of in enumerate(("0x4140", "0x4342"))
    ),
)
OF_BYTES = _asm(
    "bits, sign, one",
    "mov.b32 one, 0xBF80BF80;",
    *(
        f"shr.u32 sign, $2, {8 * place};\n"
        "lop3.b32 bits, sign, 0x007F007F, 0x43004300, 0xEA;\n"
        "lop3.b32 sign, sign, 0x00800080, 0x43004300, 0xEA;\n"
        f"fma.rn.bf16x2 ${place}, sign, one, bits;"
        for place in range(2)
    ),
)
OF_CODES = _asm(
    "bits, one",
    "mov.b32 one, 0x3F803F80;",
    *(
        f"shr.u32 bits, $4, {4 * place};\n"
        "lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;\n"
        f"fma.rn.bf16x2 ${place}, bits, one, ${5 + place};"
        for place in range(4)
    ),
)
"""Instructions that `e4m3`, `e2m1`, `scales_e4m3`, `integers8` and `integers4` carry out."""


@triton.jit
def e4m3(codes, kind: tl.constexpr):
    """The lower and the upper E4M3 numbers of each 16 bits, in a dtype."""
    # sixteen bits              S EEEE MMM s eeee mmm      0xEA of `lop3` is (a & b) | c
    # lower, shifted by 8       s eeeemmm0 0000000
    # bfloat16                  s 0000eeee mmm0000         0x7B80, below, is 2 to the power of 120
    # a byte in the upper half of 16 bits is s eeee mmm 0000 0000: all but the sign moves by four
    # bits, and 2 to the power of 120 is the difference of the exponents' biases
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            OF_E4M3, "=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        lower, upper = (codes & 0xFF).to(tl.uint8), ((codes >> 8) & 0xFF).to(tl.uint8)
        return (
            lower.to(tl.float8e4nv, bitcast=True).to(kind),
            upper.to(tl.float8e4nv, bitcast=True).to(kind),
        )


SHIFT = tl.constexpr(2.0**63)
"""What scales are multiplied by for `e2m1`."""


@triton.jit
def e2m1(codes, scales, kind: tl.constexpr):
    """The four E2M1 numbers of each 16 bits, as `FP4` orders them, times a scale each.

    Scales come multiplied by `SHIFT`, see `powers` and `scales_e4m3`. A number's bits, s and eem,
    are at 15 and at 8 to 6 where bfloat16 has them: there for the first, three bits to the right
    for the second, six for the third; the fourth has the bits that are left. As they lie numbers
    are too small by 2 to the power of 126, too much for one factor: what is left of it is for
    `unshifted`.
    """
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            OF_E2M1,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, scales[0], scales[1], scales[2], scales[3]],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:  # noqa: RET505 (as above)
        first, second = e2m1_at(codes, 0, scales[0]), e2m1_at(codes, 1, scales[1])
        third, fourth = e2m1_at(codes, 2, scales[2]), e2m1_at(codes, 3, scales[3])
        return first.to(kind), second.to(kind), third.to(kind), fourth.to(kind)


@triton.jit
def e2m1_at(codes, place: tl.constexpr, scale):
    """The numbers of `e2m1` at one of the four places, in float32 and as large as they are."""
    bits = codes.to(tl.int32) & 0xFFFF
    moved = bits << (3 * place)
    if place == 3:
        moved = (bits << 1) & 0x8000 | (bits >> 3) & 0x0180 | (bits >> 7) & 0x0040
    return ((moved & 0x81C0) << 16).to(tl.float32, bitcast=True) * SHIFT * scale


@triton.jit
def powers(exponents, kind: tl.constexpr):
    """Two to the power of E8M0 bytes, which are exponents + 127, times `SHIFT`."""
    # 63 is the exponent of `SHIFT`; with the largest byte, 191, it makes 254, float32's last finite
    # one
    found = ((exponents.to(tl.int32) + 63) << 23).to(tl.float32, bitcast=True)
    return found.to(tl.bfloat16) if kind == tl.bfloat16 else found


@triton.jit
def scales_e4m3(codes, kind: tl.constexpr):
    """E4M3 bytes without signs as numbers, times `SHIFT`."""
    # the same exponent and mantissa are too small by the difference of the biases
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            OF_SCALES, "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4
        )
    else:  # noqa: RET505 (as above)
        bits = (codes.to(tl.int32) << 20).to(tl.float32, bitcast=True)
        return bits * (2.0**120) * SHIFT


@triton.jit
def integers8(codes, kind: tl.constexpr):
    """The lower and the upper signed byte of each 16 bits, in a dtype."""
    # bfloat16 from 128 on has steps of 1: the lower seven bits of a byte are its mantissa, and the
    # sign, in the lowest bit of the exponent, makes 256 of the 128 that is subtracted
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            OF_BYTES, "=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:  # noqa: RET505 (as above)
        lower, upper = (codes & 0xFF).to(tl.int8), ((codes >> 8) & 0xFF).to(tl.int8)
        return lower.to(kind), upper.to(kind)


@triton.jit
def integers4(codes, zeros, kind: tl.constexpr):
    """The four codes of each 16 bits, the first lowest, less the zero points of groups.

    zeros: [lines, groups], of the one, two or four groups that the four quarters of a run are in.
    """
    groups: tl.constexpr = zeros.shape[1]
    first, third = part_of(zeros, 0, groups), part_of(zeros, groups // 2, groups)
    second, fourth = part_of(zeros, groups // 4, groups), part_of(zeros, groups - 1, groups)
    if kind == tl.bfloat16:
        # as of eight bits: 128 + code, less 128 + zero point
        return tl.inline_asm_elementwise(
            OF_CODES,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, _less(first), _less(second), _less(third), _less(fourth)],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:  # noqa: RET505 (as above)
        return (
            ((codes & 15).to(tl.float32) - first).to(kind),
            ((codes >> 4 & 15).to(tl.float32) - second).to(kind),
            ((codes >> 8 & 15).to(tl.float32) - third).to(kind),
            ((codes >> 12 & 15).to(tl.float32) - fourth).to(kind),
        )


@triton.jit
def _less(zero):
    """The number that is added to 128 + code."""
    return (-128.0 - zero).to(tl.bfloat16)


@triton.jit
def part_of(x, part: tl.constexpr, PARTS: tl.constexpr):
    """One of so many equal parts of the columns of x [lines, columns]."""
    if PARTS == 1:
        return x
    else:  # noqa: RET505 (as above)
        first, last = x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()
        if part < PARTS // 2:
            return part_of(first, part, PARTS // 2)
        return part_of(last, part - PARTS // 2, PARTS // 2)


@triton.jit
def unshifted(sums, kind: tl.constexpr):
    """Sums of products with numbers of `e2m1`, as large as they should be."""
    return sums * SHIFT if kind == tl.bfloat16 else sums
