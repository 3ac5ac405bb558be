"""Buckets of tensors for other processes on the same host: in shared memory, or in a GPU's memory by CUDA IPC.

The sender packs a bucket into a buffer, and gives each reader a handle of the buffer and a table of the tensors. Both
are plain values, which any way of calling another process carries. A reader makes views of the buffer, and drops them
before it answers; then the sender packs the next bucket into the same buffer.

Shared memory is an anonymous file (`memfd_create`): it has no name on any file system, no limit of /dev/shm, and ends
with the processes that use it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.tensors import dtype_named

ALIGNMENT = 256
"""Bytes to whose multiples tensors in a buffer are aligned."""

Handle = list[Any]
"""["file", path, bytes of the buffer], or ["cuda", *values of torch's storages]."""
Table = list[list[Any]]
"""[name, dtype, shape, first byte in the buffer] for each tensor."""


def reader_of(device: torch.device) -> dict[str, Any]:
    """What a process can read buckets from, as plain values for `SharedBuckets`.

    Args:
        device: device of the tensors that the process copies buckets to.

    Returns:
        "host": names the running system and its process namespace. "gpus": UUIDs of the GPUs whose memory `device`
        reads directly.
    """
    gpus: list[str] = []
    if device.type == "cuda":
        own = torch.cuda.current_device() if device.index is None else device.index
        others = [i for i in range(torch.cuda.device_count()) if i != own]
        gpus = [_uuid(i) for i in [own, *(i for i in others if torch.cuda.can_device_access_peer(own, i))]]
    return {"host": _host(), "gpus": gpus}


class SharedBuckets:
    """The sender's buffer: memory of `device` if all readers read it directly, else shared memory of the host.

    As a context manager it releases the buffer at the end. A reader must have dropped its tensors by then.

    Args:
        device: device of the tensors that are sent.
        readers: the values of `reader_of` of each reader.

    Raises:
        InputError: a reader runs on another host, or in a container with processes of its own.
    """

    def __init__(self, device: torch.device, readers: Sequence[Mapping[str, Any]]) -> None:
        if any(reader["host"] != _host() for reader in readers):
            raise InputError(
                "engine: a worker runs on another host or in another container, and weights go through the memory of "
                "one host; start the engine beside the trainer, or use vLLM's weight transfer with "
                "model.iter_hf_weights"
            )
        is_read = device.type == "cuda" and all(_uuid(device) in reader["gpus"] for reader in readers)
        self.device = device if is_read else torch.device("cpu")
        self._count, self._nbytes = len(readers), 1
        self._buffer: Tensor | None = None
        self._file: int | None = None

    def __enter__(self) -> SharedBuckets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def use_host(self) -> None:
        """Take shared memory of the host from now on, for readers that cannot open the GPU's memory."""
        self.close()
        self.device, self._nbytes = torch.device("cpu"), 1

    def close(self) -> None:
        """Release the buffer."""
        self._buffer = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @torch.no_grad()
    def pack(self, bucket: Sequence[tuple[str, Tensor]]) -> tuple[list[Handle], Table]:
        """Copy a bucket into the buffer, over the bucket before it.

        Args:
            bucket: names and tensors, of any shapes and dtypes.

        Returns:
            A handle for each reader, in their order, to be read once; and the table of the bucket.

        Raises:
            InputError: the host has no memory for the bucket, or CUDA does not share the GPU's memory.
        """
        table, end = Table(), 0
        for name, tensor in bucket:
            table.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        # A storage keeps a counter and an event for each handle that it had. On a GPU each bucket has its own storage,
        # with memory from torch's cache.
        if self._buffer is None or self._nbytes < end or self.device.type == "cuda":
            self.close()
            self._nbytes = max(self._nbytes, end)
            self._buffer = self._allocate(self._nbytes)
        buffer = self._buffer
        for (_, tensor), row in zip(bucket, table, strict=True):
            _view(buffer, row).copy_(tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [self._handle(buffer) for _ in range(self._count)], table

    def _allocate(self, nbytes: int) -> Tensor:
        if self.device.type == "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._file = os.memfd_create("ligermodels-weights")
        try:
            os.posix_fallocate(self._file, 0, nbytes)
        except OSError as error:
            raise InputError(
                f"bucket_bytes: the host has no {nbytes:,} bytes of shared memory ({error.strerror}); give fewer"
            ) from None
        return _mapped(self._file, nbytes)

    def _handle(self, buffer: Tensor) -> Handle:
        """A handle for one reader. CUDA counts the readers that have opened each of its handles."""
        if self._file is not None:
            return ["file", f"/proc/{os.getpid()}/fd/{self._file}", buffer.numel()]
        try:
            values = buffer.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise _no_cuda_ipc("share the trainer's", error) from None
        # With True as last value the reader waits for an event, which torch never closes. The bucket is complete.
        return ["cuda", *values[1:-1], False]


def read_bucket(handle: Handle, table: Table, device: torch.device) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of the sender's buffer. Drop them before the sender packs again.

    Args:
        handle: this reader's handle.
        table: table of the bucket.
        device: device of `reader_of`. Tensors in a GPU's memory count as its own.

    Raises:
        InputError: the sender's memory cannot be opened.
    """
    kind, *values = handle
    if kind == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        try:
            storage = torch.UntypedStorage._new_shared_cuda(index, *values)
        except RuntimeError as error:
            raise _no_cuda_ipc("open the trainer's", error) from None
        buffer = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)
    else:
        path, nbytes = values
        try:
            with Path(path).open("r+b") as file:
                buffer = _mapped(file.fileno(), nbytes)
        except OSError as error:
            raise InputError(
                f"engine: a worker cannot open the trainer's shared memory, {path} ({error.strerror}); start both as "
                "the same user"
            ) from None
    return [(row[0], _view(buffer, row)) for row in table]


def _no_cuda_ipc(action: str, error: RuntimeError) -> InputError:
    return InputError(
        f"engine: CUDA IPC cannot {action} GPU memory ({str(error).splitlines()[0]}); containers need the right to it, "
        "as by docker's --ipc=host and --cap-add=SYS_PTRACE"
    )


def _mapped(file: int, nbytes: int) -> Tensor:
    """uint8 (nbytes,) in the memory of an open file."""
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


def _view(buffer: Tensor, row: Sequence[Any]) -> Tensor:
    """The tensor of a row of the table."""
    _, name, shape, start = row
    dtype = dtype_named(name)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return buffer[start : start + nbytes].view(dtype).view(shape)


def _host() -> str:
    """The running system and its process namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _uuid(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
