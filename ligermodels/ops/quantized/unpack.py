"""What the kernels share: the integers of int4 from their words."""

from ligermodels.ops.runtime.dispatch import tl, triton

EXPONENT = 0x4B000000
"""Bits of 2 ** 23 in float32. Where sums are made without tensor cores they are an argument of the kernel: one
instruction takes no two constants. Before tensor cores they are a constant: then Triton brings the words into the
layout that those take, and not the numbers made of them. Both seen in the code for sm_90."""


@triton.jit
def int4_values(words, exponent, INDEX: tl.constexpr):
    """q of input 16 INDEX + j of a group, float32, from its words j.

    The 4 bits c at 4 INDEX (from INDEX 5 on, of the words shifted right by 20) stay where they are: EXPONENT | c << 4 s
    are the bits of 2 ** 23 + c * 16 ** s, so that one multiplication and addition, both exact, give c - 8.
    """
    if INDEX < 5:
        bits, SHIFT = words & (15 << (4 * INDEX)), 4 * INDEX
    else:
        bits, SHIFT = (words >> 20) & (15 << (4 * (INDEX - 5))), 4 * (INDEX - 5)
    return (bits | exponent).to(tl.float32, bitcast=True) * (1.0 / (1 << SHIFT)) - (8388608.0 / (1 << SHIFT) + 8.0)
