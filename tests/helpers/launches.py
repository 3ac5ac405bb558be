"""Launches of kernels as Triton compiles them, and what of them the compile matrix has to see."""

import hashlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel as a launch compiles it: arguments of triton.compiler.ASTSource, and options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return name_of(self.kernel)

    @property
    def hash(self) -> str:
        """Of all that Triton compiles but the target, and what only AMD GPUs are told of pointers."""
        from triton import __version__
        from triton.compiler import ASTSource

        attributes = {
            at: [each for each in told if each[0] != "tt.pointer_range"] for at, told in self.attributes.items()
        }
        source = ASTSource(self.kernel, self.signature, self.constants, attributes)
        return hashlib.sha256(f"{__version__} {source.hash()} {sorted(self.options.items())}".encode()).hexdigest()

    @property
    def tile_size(self) -> int:
        """The product of the sizes among its constants."""
        return math.prod(filter(is_size, self.constants.values()))

    def __str__(self) -> str:
        names = self.kernel.arg_names
        constants = {names[place]: value for (place, *_), value in self.constants.items()}
        return f"{self.name} {self.options} {constants} {sorted(set(self.signature.values()))}"


def fewest(parts: dict[Any, set[Any]], seen: set[Any]) -> Iterator[Any]:
    """The fewest keys that have all parts but those `seen`, greedily: next is the one with the most that are missing,
    the first of equal ones."""
    missing = set().union(*parts.values()) - seen
    while missing:
        best = max(parts, key=lambda known: len(parts[known] & missing))
        missing -= parts[best]
        yield best


def values_of(launch: Launch) -> set[tuple[Any, ...]]:
    """Each dtype, constant, alignment and option of a launch, with its kernel."""
    values = [*launch.signature.items(), *launch.constants.items(), *launch.attributes.items(), *launch.options.items()]
    return {(launch.name, str(name), str(value)) for name, value in values}


def machine_code_of(launch: Launch) -> set[tuple[str, ...]]:
    """The parts of a launch that LLVM and the assembler see: its kernel with each dtype, float16 counted as bfloat16.
    Tiles have been divided among threads by then, and each flag's branch has passed Triton's own passes."""
    dtypes = {dtype.replace("*fp16", "*bf16") for dtype in launch.signature.values()}
    return {(launch.name, dtype) for dtype in dtypes if dtype.startswith("*") and "i" not in dtype} | {(launch.name,)}


def is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix('ligermodels.ops.')}.{kernel.fn.__name__}"
