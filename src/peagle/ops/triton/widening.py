"""Numbers of 8 and 4 bits become bfloat16 in registers, which holds all formats exactly.

Instructions that convert take 16 numbers a cycle and multiprocessor: memory brings them faster. So
bits are moved instead, two numbers an instruction: exponent and mantissa to where bfloat16 has the
lowest bits of its exponent and its mantissa. One product with a power of two then sets exponents
right, those of subnormal numbers too. NaN, which no weight holds, would become a number.

To the product -0 is added, which changes nothing: before Hopper no instruction multiplies alone.
"""

import triton
import triton.language as tl

BFLOAT16_OF_E4M3 = tl.constexpr(
    """
    {
    .reg .b32 lower, rest, power, zero;
    mov.b32 zero, 0x80008000;
    mov.b32 power, 0x7B807B80;
    shl.b32 lower, $2, 8;
    shl.b32 rest, $2, 4;
    and.b32 rest, rest, 0x07F007F0;
    lop3.b32 lower, lower, 0x80008000, rest, 0xEA;
    fma.rn.bf16x2 $0, lower, power, zero;
    shr.u32 rest, $2, 4;
    and.b32 rest, rest, 0x07F007F0;
    lop3.b32 rest, $2, 0x80008000, rest, 0xEA;
    fma.rn.bf16x2 $1, rest, power, zero;
    }
    """
)
"""Makes lower and upper numbers of 16 bits, two of which a thread has in 32."""


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
            BFLOAT16_OF_E4M3,
            "=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
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
            """
            {
            .reg .b32 bits, rest, zero;
            mov.b32 zero, 0x80008000;
            and.b32 bits, $4, 0x81C081C0;
            fma.rn.bf16x2 $0, bits, $5, zero;
            shl.b32 bits, $4, 3;
            and.b32 bits, bits, 0x81C081C0;
            fma.rn.bf16x2 $1, bits, $6, zero;
            shl.b32 bits, $4, 6;
            and.b32 bits, bits, 0x81C081C0;
            fma.rn.bf16x2 $2, bits, $7, zero;
            shl.b32 bits, $4, 1;
            and.b32 bits, bits, 0x80008000;
            shr.u32 rest, $4, 3;
            lop3.b32 bits, rest, 0x01800180, bits, 0xEA;
            shr.u32 rest, $4, 7;
            lop3.b32 bits, rest, 0x00400040, bits, 0xEA;
            fma.rn.bf16x2 $3, bits, $8, zero;
            }
            """,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, scales[0], scales[1], scales[2], scales[3]],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:  # noqa: RET505 (as above)
        return (
            e2m1_at(codes, 0, scales[0]).to(kind),
            e2m1_at(codes, 1, scales[1]).to(kind),
            e2m1_at(codes, 2, scales[2]).to(kind),
            e2m1_at(codes, 3, scales[3]).to(kind),
        )


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
    # float32 with the same exponent and mantissa is too small by the difference of the biases
    bits = (codes.to(tl.int32) << 20).to(tl.float32, bitcast=True)
    found = bits * (2.0**120) * SHIFT
    return found.to(tl.bfloat16) if kind == tl.bfloat16 else found


@triton.jit
def integers8(codes, kind: tl.constexpr):
    """The lower and the upper signed byte of each 16 bits, in a dtype."""
    # bfloat16 from 128 on has steps of 1: the lower seven bits of a byte are its mantissa, and the
    # sign, in the lowest bit of the exponent, makes 256 of the 128 that is subtracted
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bits, sign, one;
            mov.b32 one, 0xBF80BF80;
            and.b32 bits, $2, 0x007F007F;
            or.b32 bits, bits, 0x43004300;
            and.b32 sign, $2, 0x00800080;
            or.b32 sign, sign, 0x43004300;
            fma.rn.bf16x2 $0, sign, one, bits;
            shr.u32 sign, $2, 8;
            and.b32 bits, sign, 0x007F007F;
            or.b32 bits, bits, 0x43004300;
            and.b32 sign, sign, 0x00800080;
            or.b32 sign, sign, 0x43004300;
            fma.rn.bf16x2 $1, sign, one, bits;
            }
            """,
            "=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:  # noqa: RET505 (as above)
        lower, upper = (codes & 0xFF).to(tl.int8), ((codes >> 8) & 0xFF).to(tl.int8)
        return lower.to(kind), upper.to(kind)


@triton.jit
def integers4(codes, zeros, kind: tl.constexpr):
    """The four codes of each 16 bits, the first lowest, less a zero point each [lines]."""
    if kind == tl.bfloat16:
        # as of eight bits: 128 + code, less 128 + zero point
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 bits, one;
            mov.b32 one, 0x3F803F80;
            lop3.b32 bits, $4, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, bits, one, $5;
            shr.u32 bits, $4, 4;
            lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, bits, one, $6;
            shr.u32 bits, $4, 8;
            lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $2, bits, one, $7;
            shr.u32 bits, $4, 12;
            lop3.b32 bits, bits, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $3, bits, one, $8;
            }
            """,
            "=r,=r,=r,=r,r,r,r,r,r",
            [codes, _less(zeros[0]), _less(zeros[1]), _less(zeros[2]), _less(zeros[3])],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:  # noqa: RET505 (as above)
        return (
            ((codes & 15).to(tl.float32) - zeros[0][:, None]).to(kind),
            ((codes >> 4 & 15).to(tl.float32) - zeros[1][:, None]).to(kind),
            ((codes >> 8 & 15).to(tl.float32) - zeros[2][:, None]).to(kind),
            ((codes >> 12 & 15).to(tl.float32) - zeros[3][:, None]).to(kind),
        )


@triton.jit
def _less(zero):
    """The number that is added to 128 + code: [lines, 1]."""
    return (-128.0 - zero).to(tl.bfloat16)[:, None]


@triton.jit
def unshifted(sums, kind: tl.constexpr):
    """Sums of products with numbers of `e2m1`, as large as they should be."""
    return sums * SHIFT if kind == tl.bfloat16 else sums
