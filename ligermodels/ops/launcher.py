"""Launches of Triton kernels that cost little on the host.

At every launch Triton works out anew for which kind of arguments the kernel has to be compiled, which takes longer than
a small kernel runs. Here a compiled kernel is found by a key that is cheaper to make and tells apart at least what
Triton does on NVIDIA GPUs: dtypes of tensors, whether an integer is 1, a multiple of 16 or beyond 32 or 64 bits, and
constants. Triton's knobs, but for its launch hooks, count when a kernel is launched for the first time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ligermodels.ops.dispatch import HAS_TRITON, INTERPRETED, triton

ALIGNED = 16  # bytes; kernels are compiled for tensors that begin at a multiple of this
BY_TYPE = (float, bool, type(None))  # of which the value makes no difference
MAX_KNOWN = 4096  # launches of a kernel that differ in grid or kind, before all are forgotten: sizes may never repeat


class Kernel:
    """A Triton kernel, launched as `kernel[grid](*arguments, **constants)`.

    Arguments: tensors, ints, floats and None, by position, in the order of the signature. Constants by name: the
    signature's last parameters, and options such as num_warps. The current device is that of the tensors.
    """

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        self._known: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        kinds: list[Any] = [torch.cuda.current_device(), grid, *constants.items()]
        addresses = 0
        for argument in arguments:  # a plain loop: this runs at every launch
            if isinstance(argument, torch.Tensor):
                kinds.append(argument.dtype)
                addresses |= argument.data_ptr()
            elif type(argument) is int:
                bits = (argument ^ argument >> 63).bit_length()  # but the sign's
                kinds.append(1 if argument == 1 else (bits + 32 & ~31) + (argument % 16 == 0))
            else:
                kinds.append(type(argument) if isinstance(argument, BY_TYPE) else (type(argument), argument))
        if addresses % ALIGNED:
            self._jitted[grid](*arguments, **constants)
            return
        key = tuple(kinds)
        known = self._known.get(key)
        if known is not None:
            launch, rest = known
            launch(*arguments, *rest)
            return
        compiled = self._jitted[grid](*arguments, **constants)
        if not isinstance(compiled, triton.compiler.CompiledKernel):
            return  # a hook refused to compile it, or it is being compiled elsewhere
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        names = self._jitted.arg_names[len(arguments) :]
        launch = compiled[grid + (1,) * (3 - len(grid))]
        self._known[key] = launch, tuple(constants[name] for name in names)


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator: the function as a Triton kernel that the host launches. `triton.jit` is for what kernels call."""
    jitted = triton.jit(function)
    return Kernel(jitted) if HAS_TRITON and not INTERPRETED else jitted
