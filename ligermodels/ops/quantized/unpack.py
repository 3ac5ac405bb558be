"""What the kernels share: codes as numbers of the dtype of x, exactly.

In assembly int4 takes 12 instructions for eight numbers, two in a register at a time: Triton's own code for the same
takes each by itself. Triton's interpreter has no assembly."""

from ligermodels.ops.runtime.dispatch import IN_INTERPRETER, tl, triton


@triton.jit
def float8_values(codes, DTYPE: tl.constexpr):
    """E4M3 codes as DTYPE, bfloat16 or float16."""
    return codes.to(tl.float32).to(DTYPE)  # fewer instructions by way of float32


@triton.jit
def int4_values(codes, DTYPE: tl.constexpr):
    """q of the low and of the high four bits of bytes, each as DTYPE, bfloat16 or float16.

    Bits c below those of 128, whose neighbours in bfloat16 are 1 apart, are 128 + c; so are 1024 + c those below 1024's
    in float16, and four bits higher 1024 + 16 c. One fused multiplication and addition, exact, gives c - 8."""
    if IN_INTERPRETER:
        low, high = ((codes & 15).to(tl.float32) - 8).to(DTYPE), ((codes >> 4).to(tl.float32) - 8).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 bytes, by4, by8, by12, one, less;"
            "mov.b32 one, 0x3f803f80; mov.b32 less, 0xc308c308;"  # 1 and -136, twice
            "prmt.b32 bytes, $4, 0, 0x3120;"  # those of a pair into the halves of the word
            "shr.u32 by4, bytes, 4; shr.u32 by8, bytes, 8; shr.u32 by12, bytes, 12;"
            "lop3.b32 $0, bytes, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $0, $0, one, less;"
            "lop3.b32 $1, by8, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $1, $1, one, less;"
            "lop3.b32 $2, by4, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $2, $2, one, less;"
            "lop3.b32 $3, by12, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $3, $3, one, less; }",
            "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 bytes, by8, one, less, part, rest;"
            "mov.b32 one, 0x3c003c00; mov.b32 less, 0xe408e408;"  # 1 and -1032
            "mov.b32 part, 0x2c002c00; mov.b32 rest, 0xd480d480;"  # 1 / 16 and -72
            "prmt.b32 bytes, $4, 0, 0x3120; shr.u32 by8, bytes, 8;"
            "lop3.b32 $0, bytes, 0x000f000f, 0x64006400, 0xea; fma.rn.f16x2 $0, $0, one, less;"
            "lop3.b32 $1, by8, 0x000f000f, 0x64006400, 0xea; fma.rn.f16x2 $1, $1, one, less;"
            "lop3.b32 $2, bytes, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 $2, $2, part, rest;"
            "lop3.b32 $3, by8, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 $3, $3, part, rest; }",
            "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return low, high
