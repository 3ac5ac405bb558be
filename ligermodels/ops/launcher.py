"""Launches of Triton kernels that cost little on the host and leave no gap on the device.

At every launch Triton works out anew for which kind of arguments the kernel has to be compiled, which takes longer than
a small kernel runs. Here a compiled kernel is found by a key that is cheaper to make and tells apart at least what
Triton does on NVIDIA GPUs: dtypes of tensors, whether an integer is 1, a multiple of 16 or beyond 32 or 64 bits, and
constants. Triton's knobs, but for its launch hooks, count when a kernel is launched for the first time. Without such
hooks it is not asked again at all: what Triton compiled is run, as torch's own compiler does it.

From compute capability 9.0 on, a kernel that waits by `after_previous_kernel()` is launched while the one before it on
its stream still runs, so that its programs are in place when that ends: programmatic dependent launch,
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ligermodels.ops.dispatch import HAS_TRITON, INTERPRETED, tl, triton

ALIGNED = 16  # bytes; kernels are compiled for tensors that begin at a multiple of this
BY_TYPE = frozenset((float, bool, type(None)))  # of which the value makes no difference
MAX_KNOWN = 4096  # launches of a kernel that differ in grid or kind, before all are forgotten: sizes may never repeat
DEPENDENT_LAUNCH = (9, 0)  # the compute capability that has it
OVERLAPS = hasattr(tl, "target_info") and not INTERPRETED  # from Triton 3.5 on


_knobs: Any = triton.knobs.runtime if HAS_TRITON else None

if OVERLAPS:  # Triton looks up what a function names even where it would not run.

    @triton.jit
    def let_next_kernel_start():
        """The kernel after this one may be launched as soon as all programs have come here; for it waits, as below."""
        if tl.target_info.cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_launch_dependents()

    @triton.jit
    def after_previous_kernel():
        """Wait until the kernels before this one have ended, and what they wrote can be read: a kernel's first
        statement, but for what it asks for."""
        let_next_kernel_start()
        if tl.target_info.cuda_capability_geq(9, 0):
            tl.extra.cuda.gdc_wait()

    @triton.jit
    def ask_for(start, count):
        """Have `count` elements from `start` on, less than 2 GiB, brought to the L2 cache, unless they are no whole 16
        bytes. It may come before `after_previous_kernel`: what that kernel still writes goes through the same cache."""
        address = start.to(tl.int64)
        size = tl.cast(count * (start.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
        thread = tl.where((address | size) % 16 == 0, 0, -1)
        if tl.target_info.cuda_capability_geq(9, 0):
            tl.inline_asm_elementwise(
                """{
                .reg .pred asks;
                .reg .s32 own;
                mov.s32 own, %tid.x;
                setp.eq.s32 asks, own, $3;
                @asks cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.s32 $0, 0;
                }""",
                constraints="=r,l,r,r",
                args=[address, size, thread],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

else:

    @triton.jit
    def let_next_kernel_start():
        """Kernels run one after another here."""

    @triton.jit
    def after_previous_kernel():
        """Kernels run one after another here."""

    @triton.jit
    def ask_for(start, count):
        """Nothing: the kernel asks for it when it needs it."""


def _hooks() -> Any:
    """Whether somebody, such as a profiler, asked Triton to be told of launches."""
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    return getattr(enter, "calls", enter) or getattr(leave, "calls", leave)  # chains of hooks; in Triton 3.4 a hook


@functools.lru_cache(2**14)
def _kind(number: int) -> int:
    """Equal for integers that Triton compiles the same kernel for."""
    bits = (number ^ number >> 63).bit_length()  # but the sign's
    return 1 if number == 1 else (bits + 32 & ~31) + (number % 16 == 0)


class Known(NamedTuple):
    """A compiled kernel: how it is launched with Triton's hooks and, `direct`, without; the grid, what its launcher
    needs to know of it, and the constants, which follow the arguments."""

    hooked: Callable[..., None]
    direct: Callable[..., None]
    grid: tuple[int, ...]
    function: Any
    metadata: Any
    rest: tuple[Any, ...]


class Kernel:
    """A Triton kernel, launched as `kernel[grid](*arguments, **constants)`.

    Arguments: tensors, ints, floats and None, by position, in the order of the signature. Constants by name: the
    signature's last parameters, and options such as num_warps. The current device is that of the tensors. `waits`: the
    kernel itself waits for those before it.
    """

    def __init__(self, jitted: Any, waits: bool = False) -> None:
        self._jitted, self._waits = jitted, waits
        self._known: dict[Any, Known] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        device = torch._C._cuda_getDevice()  # torch.cuda.current_device, but for asking whether CUDA has been set up
        kinds: list[Any] = [device, grid, *constants.items()]
        values: list[Any] = []  # addresses in place of tensors, which Triton would have to ask for them once more
        addresses = 0
        for argument in arguments:  # a plain loop: this runs at every launch
            value: Any = argument
            kind: Any = type(argument)
            if kind is int:
                kind = _kind(argument)
            elif kind not in BY_TYPE:
                if isinstance(argument, torch.Tensor):
                    value, kind = argument.data_ptr(), argument.dtype
                    addresses |= value if argument.is_cuda else 1
                else:
                    kind = kind, argument
            kinds.append(kind)
            values.append(value)
        if addresses % ALIGNED:
            self._compiled(grid, arguments, constants)
            return
        key = tuple(kinds)
        known = self._known.get(key)
        if known is None:
            self._first(key, grid, arguments, constants)
        elif _hooks():
            known.hooked(*values, *known.rest)
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            known.direct(*known.grid, stream, known.function, known.metadata, None, None, None, *values, *known.rest)

    def _first(self, key: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """A launch that Triton prepares."""
        compiled = self._compiled(grid, arguments, constants)
        if not isinstance(compiled, triton.compiler.CompiledKernel):
            return  # a hook refused to compile it, or it is being compiled elsewhere
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        rest = tuple(constants[name] for name in self._jitted.arg_names[len(arguments) :])
        whole = (*grid, 1, 1)[:3]
        self._known[key] = Known(
            compiled[whole], compiled.run, whole, compiled.function, compiled.packed_metadata, rest
        )

    def _compiled(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """The kernel that Triton compiles or finds, and launches."""
        if self._waits and torch.version.cuda and torch.cuda.get_device_capability() >= DEPENDENT_LAUNCH:
            constants = {**constants, "launch_pdl": True}
        return self._jitted[grid](*arguments, **constants)


def kernel(function: Callable[..., Any]) -> Any:
    """Decorator: the function as a Triton kernel that the host launches. `triton.jit` is for what kernels call."""
    jitted = triton.jit(function)
    waits = OVERLAPS and "after_previous_kernel" in function.__code__.co_names
    return Kernel(jitted, waits) if HAS_TRITON and not INTERPRETED else jitted
