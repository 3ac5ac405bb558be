"""Launching Triton kernels with little work on the CPU and no gap on the device.

At every launch, Triton determines again for which types of arguments the kernel must be compiled. That takes longer
than a small kernel runs. Here a compiled kernel is looked up by a cheaper key. The key distinguishes at least all cases
that Triton distinguishes on NVIDIA GPUs: dtypes of tensors, integers that are 1, multiples of 16 or beyond 32 or 64
bits, and constants. Triton's knobs, except for its launch hooks, take effect at the first launch of a kernel.

On NVIDIA GPUs from Hopper on, kernels with a parameter `PDL` may start before the previous kernel has ended (CUDA's
programmatic dependent launch), also in CUDA graphs. They first wait for its end, see `wait_for_previous`. That saves
half a microsecond between two kernels, of the few that a kernel of a decoding step takes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ligermodels.ops.runtime.devices import gpu_of, is_hip
from ligermodels.ops.runtime.dispatch import HAS_TRITON, INTERPRETED, tl, triton

ALIGNED = 16  # bytes; kernels are compiled for tensors that begin at a multiple of this
BY_TYPE = frozenset((float, bool, type(None)))  # compiled for the type of the argument, not for its value
MAX_THREADS = 1024  # per program, on all GPUs
MAX_KNOWN = 4096  # cached launches per kernel; then the cache is cleared: sizes may never repeat


@functools.lru_cache(2**14)
def _integer_key(number: int) -> int:
    """A key that two integers share only if Triton compiles the same kernel for both."""
    bits = (number ^ number >> 63).bit_length()  # without the sign
    return 1 if number == 1 else (bits + 32 & ~31) + (number % 16 == 0)


class Kernel:
    """A Triton kernel, launched as `kernel[grid](*arguments, **constants)`.

    Arguments are tensors on the current device, ints, floats and None, by position, in the order of the signature.
    Constants are passed by name: the last parameters of the signature, num_warps, and other options.
    """

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        self._cache: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}  # key -> launch function, constants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        key_parts: list[Any] = [torch.cuda.current_device(), grid, *constants.items()]
        values: list[Any] = []  # the arguments, with addresses in place of tensors
        addresses = 0
        for argument in arguments:  # a plain loop: this runs at every launch
            value: Any = argument
            key_part: Any = type(argument)
            if key_part is int:
                key_part = _integer_key(argument)
            elif key_part not in BY_TYPE:
                if isinstance(argument, torch.Tensor):
                    value, key_part = argument.data_ptr(), argument.dtype
                    addresses |= value if argument.is_cuda else 1
                else:
                    key_part = key_part, argument
            key_parts.append(key_part)
            values.append(value)
        if addresses % ALIGNED:
            self._by_triton(grid, arguments, {**constants, **self._early()})
            return
        key = tuple(key_parts)
        cached = self._cache.get(key)
        if cached is None:
            self._first(key, grid, arguments, constants)
        else:
            launch, constant_values = cached
            launch(*values, *constant_values)

    def _by_triton(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        return self._jitted[grid](*arguments, **{**constants, "num_warps": _warps(constants["num_warps"])})

    def _early(self) -> dict[str, bool]:
        """Options that let a kernel with a parameter `PDL` start before the previous one has ended."""
        if "PDL" not in self._jitted.arg_names:
            return {}
        gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
        return {"PDL": True, "launch_pdl": True} if gpu is not None and gpu.has_pdl else {"PDL": False}

    def _first(self, key: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """The first launch with a key: by Triton, whose compiled kernel is then cached.

        On AMD GPUs every launch is the first. There Triton compiles other code for tensors of 2 GiB, which the key does
        not tell apart."""
        constants = {**constants, **self._early()}
        compiled = self._by_triton(grid, arguments, constants)
        if is_hip() or not isinstance(compiled, triton.compiler.CompiledKernel):
            return  # a hook skipped the launch, or the kernel is compiled asynchronously
        if len(self._cache) >= MAX_KNOWN:
            self._cache.clear()
        constant_values = tuple(constants[name] for name in self._jitted.arg_names[len(arguments) :])
        self._cache[key] = compiled[(*grid, 1, 1)[:3]], constant_values


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """The first statement of a kernel with the parameter `PDL: tl.constexpr = False`: waits until the previous kernel
    has ended and its results are visible. PDL: whether the kernel may start before that."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def _warps(num_warps: int) -> int:
    """Warps of a program: AMD's have 64 threads, and a program has at most MAX_THREADS."""
    return min(num_warps, MAX_THREADS // 64) if is_hip() else num_warps


def kernel(function: Callable[..., Any], do_not_specialize: Sequence[str] = ()) -> Any:
    """Decorator for a Triton kernel that the host launches. Functions that kernels call take `triton.jit`.

    Args:
        function: the kernel.
        do_not_specialize: names of integers for whose values, such as 1, Triton compiles no kernels of their own.
    """
    jitted = triton.jit(function, do_not_specialize=do_not_specialize)
    return Kernel(jitted) if HAS_TRITON and not INTERPRETED else jitted
