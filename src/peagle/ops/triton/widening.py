"""Numbers of 8 and 4 bits in registers as bfloat16, which holds both formats exactly.

Instructions that convert take 16 numbers a cycle and multiprocessor: memory brings them faster. So
bits are moved instead, two numbers an instruction: exponent and mantissa to where bfloat16 has the
lowest bits of its exponent and its mantissa. One product with a power of two then sets exponents
right, those of subnormal numbers too. NaN, which no weight holds, would become a number.

To the product -0 is added, which changes nothing: before Hopper no instruction multiplies alone.
"""

import triton
import triton.language as tl


@triton.jit
def e4m3(codes, kind: tl.constexpr):
    """The lower and the upper E4M3 numbers of each 16 bits, in a dtype."""
    # a byte in the upper half of 16 bits is s eeee mmm 0000 0000: all but the sign moves by four
    # bits, and 2 to the power of 120 is the difference of the exponents' biases
    if kind == tl.bfloat16:
        return tl.inline_asm_elementwise(
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
            """,
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
"""What powers of two are multiplied by for `e2m1`."""


@triton.jit
def e2m1(codes, first, last, kind: tl.constexpr):
    """The four E2M1 numbers of each 16 bits, as `Mxfp4Weight` orders them, times powers of two.

    first: the powers of the first two times `SHIFT`, see `powers`; last: of the others. A number's
    bits, s and eem, are at 15 and at 8 to 6 where bfloat16 has them: there for the first, three
    bits to the right for the second, six for the third; the fourth has the bits that are left. As
    they lie numbers are too small by 2 to the power of 126, too much for one factor: what is left
    of it is for `unshifted`.
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
            fma.rn.bf16x2 $1, bits, $5, zero;
            shl.b32 bits, $4, 6;
            and.b32 bits, bits, 0x81C081C0;
            fma.rn.bf16x2 $2, bits, $6, zero;
            shl.b32 bits, $4, 1;
            and.b32 bits, bits, 0x80008000;
            shr.u32 rest, $4, 3;
            lop3.b32 bits, rest, 0x01800180, bits, 0xEA;
            shr.u32 rest, $4, 7;
            lop3.b32 bits, rest, 0x00400040, bits, 0xEA;
            fma.rn.bf16x2 $3, bits, $6, zero;
            }
            """,
            "=r,=r,=r,=r,r,r,r",
            [codes, first, last],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:  # noqa: RET505 (as above)
        bits = codes.to(tl.int32) & 0xFFFF
        fourth = (bits << 1) & 0x8000 | (bits >> 3) & 0x0180 | (bits >> 7) & 0x0040
        return (
            _number(bits, first, kind),
            _number(bits << 3, first, kind),
            _number(bits << 6, last, kind),
            _number(fourth, last, kind),
        )


@triton.jit
def _number(bits, power, kind: tl.constexpr):
    """As above, of one number, and no smaller than it is: not every dtype has room for that."""
    value = ((bits & 0x81C0) << 16).to(tl.float32, bitcast=True) * SHIFT
    return (value * power).to(kind)


@triton.jit
def powers(exponents, kind: tl.constexpr):
    """Two to the power of E8M0 bytes, which are exponents + 127, times `SHIFT`."""
    found = ((exponents.to(tl.int32) + 63) << 23).to(tl.float32, bitcast=True)
    return found.to(tl.bfloat16) if kind == tl.bfloat16 else found


@triton.jit
def unshifted(sums, kind: tl.constexpr):
    """Sums of products with what `e2m1` made."""
    return sums * SHIFT if kind == tl.bfloat16 else sums
