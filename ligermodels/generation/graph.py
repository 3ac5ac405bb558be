"""Decode steps without gaps on the GPU: each step is one CUDA graph (one launch for hundreds of kernels), and the next
step is launched before the CPU knows whether it is needed."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from ligermodels.ops.runtime.tensors import AsyncHostCopy

Result = TypeVar("Result")


AHEAD = ("cuda",)
"""Types of devices that run asynchronously, so that launching a possibly superfluous step saves time."""


class Finished:
    """Reads on the CPU whether a loop of steps on a device has ended.

    Reading the newest flag would wait for the device, and the device would then wait for the CPU to launch the next
    step. So, if `enabled` and the device is AHEAD, each call but the first reads the flag of the call before: the loop
    ends one step late.
    """

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self._late = enabled and device.type in AHEAD
        self._asked: AsyncHostCopy | None = None

    def __call__(self, flag: Tensor) -> int | None:
        """Number of superfluous steps (0 or 1) if the loop has ended, else None. `flag`: one bool, True at the end."""
        ended, ago = (bool(flag), 0) if self._asked is None else (self._asked.get(), 1)
        self._asked = AsyncHostCopy(flag) if self._late else None
        return ago if ended else None


class Graphed(Generic[Result]):
    """Calls a function on tensors at fixed addresses; from the second call on it replays a CUDA graph of the function.

    The function reads and changes tensors in place and does not synchronise. It returns None or tensors, and the next
    call overwrites these tensors. The first call runs the function itself, to compile its kernels, unless they
    are compiled already (`is_warm`). On other devices, and if not `enabled`, every call runs the function. Graphs of
    one memory `pool` (`torch.cuda.graph_pool_handle`) share their memory: a call of one overwrites the others' results.
    """

    def __init__(
        self,
        function: Callable[[], Result],
        device: torch.device,
        enabled: bool = True,
        is_warm: bool = False,
        pool: Any = None,
    ) -> None:
        self._function, self._device = function, device
        self._enabled = enabled and device.type == "cuda"
        self._warm, self._pool = is_warm, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self) -> Result:
        if not self._enabled or not self._warm:
            self._warm = True
            return self._function()
        self.record()
        if self._graph is not None:
            self._graph.replay()
        return cast(Result, self._result)

    def record(self) -> None:
        """Record the function now, if no call has done so. RuntimeError if it does anything that a graph cannot."""
        if self._enabled and self._graph is None:
            self._graph = self._recorded()

    def _recorded(self) -> torch.cuda.CUDAGraph:
        """Record the function without running it.

        Not with `torch.cuda.graph`: it waits for the device and releases all memory that torch has cached on device and
        host. The next step and the next `generate` allocate it again, and this takes longer than a step.
        """
        make_room(self._device)
        graph = torch.cuda.CUDAGraph()
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        generator = torch.cuda.default_generators[index]
        random_state = generator.clone_state()
        # In mode "thread_local" other threads do not disturb a recording, except by another recording on the stream.
        with _RECORDING, torch.cuda.stream(_recording_stream(self._device)):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._result = self._function()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # The recording is invalid; the cause is raised below.
                    graph.capture_end()
                generator.graphsafe_set_state(random_state)  # the generator would believe that it is still recorded
                raise
            graph.capture_end()
        return graph


_RECORDING = threading.Lock()


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all recordings: cuBLAS keeps a workspace for every stream that it was used on."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def waits_for(device: torch.device) -> Iterator[list[str]]:
    """Context manager that lists the places in Python ("file:line") where the host waits for a CUDA device. In the
    backward pass the place is its call."""
    places: list[str] = []
    if device.type != "cuda":
        yield places
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=_WAIT)
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if str(each.message).startswith(_WAIT):
            places.append(f"{each.filename}:{each.lineno}")
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)


_WAIT = "called a synchronizing CUDA operation"
"""What torch warns of in this debug mode."""


def make_room(device: torch.device) -> None:
    """Release torch's cached memory on a CUDA device if it is more than an eighth of the free memory.

    During a recording torch allocates new memory and cannot release its cache if memory runs out. The cache also has
    the memory of deleted graphs, which nothing else can use.
    """
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if 8 * cached > torch.cuda.mem_get_info(device)[0]:
        torch.cuda.empty_cache()
