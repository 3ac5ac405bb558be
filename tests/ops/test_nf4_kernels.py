"""The assembly that converts codes of nf4 and mxfp4 on GPUs, emulated."""

from collections.abc import Callable

import pytest
import torch

from ligermodels.ops.quantized import unpack
from ligermodels.ops.quantized.weights import FP4_LEVELS, NF4_LEVELS

LEVELS = torch.tensor(NF4_LEVELS)
FP4 = torch.tensor(FP4_LEVELS)
TABLES = {
    "_BFLOAT16_LEVELS": LEVELS.bfloat16(), "_FLOAT16_LEVELS": LEVELS.half(),
    "_BFLOAT16_FP4": FP4.bfloat16(), "_FLOAT16_FP4": FP4.half(),
}  # fmt: skip


def prmt(a: int, b: int, selector: int) -> int:
    """Four of eight bytes, or their sign bits eight times: see PTX's manual."""
    source = (a | b << 32).to_bytes(8, "little")
    choices = [selector >> 4 * i & 15 for i in range(4)]
    selected = [255 * (source[c & 7] >> 7) if c & 8 else source[c & 7] for c in choices]
    return int.from_bytes(bytes(selected), "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Bit by bit, the bit of `table` whose number has the bits of a, b and c."""
    bits = [table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1 for i in range(32)]
    return sum(bit << i for i, bit in enumerate(bits))


def fma(dtype: torch.dtype) -> Callable[[int, int, int], int]:
    """a * b + c of both halves, rounded once; float64 is exact here."""

    def call(*words: int) -> int:
        a, b, c = (torch.tensor([w], dtype=torch.uint32).view(dtype).double() for w in words)
        return int((a * b + c).to(dtype).view(torch.uint32))

    return call


INSTRUCTIONS = {
    "mov.b32": lambda a: a, "fma.rn.bf16x2": fma(torch.bfloat16), "fma.rn.f16x2": fma(torch.float16),
    "and.b32": int.__and__, "shr.u32": int.__rshift__, "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF, "prmt.b32": prmt, "lop3.b32": lop3,
}  # fmt: skip


def emulated(assembly: str, codes: list[int]) -> list[int]:
    """The words $0 to $3 for four bytes of codes."""
    registers = {"$4": int.from_bytes(bytes(codes), "little")}
    for line in assembly.strip("{} ").split(";"):
        instruction, _, operands = line.strip().partition(" ")
        if instruction in INSTRUCTIONS:
            target, *inputs = operands.split(", ")
            values = [registers[name] if name in registers else int(name, 0) for name in inputs]
            registers[target] = INSTRUCTIONS[instruction](*values)
        else:
            assert instruction in (".reg", "")
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("name", TABLES)
def test_assembly_converts_codes(name: str) -> None:
    """Bit by bit, with the sign of -0."""
    table = [entry & 0xFFFF for entry in TABLES[name].view(torch.int16).tolist()]
    assembly = getattr(unpack, name)
    for byte in range(256):
        codes = [byte, (byte * 7 + 3) % 256, (byte * 31 + 9) % 256, 255 - byte]
        words = emulated(getattr(assembly, "value", assembly), codes)
        halves = [word >> shift & 0xFFFF for word in words for shift in (0, 16)]
        assert halves == [table[code & 15] for code in codes] + [table[code >> 4] for code in codes]
