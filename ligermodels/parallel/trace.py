"""Trace a training step of one rank on the meta device: all allocations and releases of memory, in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ligermodels.errors import InputError
from ligermodels.layers import Compute, Linear
from ligermodels.layers.context_parallel import check_context_parallel
from ligermodels.layers.modules import modules_of
from ligermodels.layers.offload import host_bytes
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops.runtime.library import host_code
from ligermodels.parallel.shares import Shares
from ligermodels.parallel.tensor import tensor_part

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Trace:
    """Allocations of a forward and backward pass. Parameters have numbers in the order of `model.parameters()`.

    Args:
        changes: bytes allocated (or, below 0, released) at each event.
        parameters: for each event, the number of the parameter if the storage becomes its gradient, otherwise -1.
        complete: number of each trained parameter -> event that completes its gradient.
        forward: number of events of the forward pass.
        workspace: bytes that the head's loss takes at the end of the forward pass.
        exchanged: bytes of hidden states that tensor-parallel ranks gather, or are about to sum, at once within an op.
        host: bytes of host memory at the end of the forward pass.
    """

    changes: Numbers
    parameters: Numbers
    complete: dict[int, int]
    forward: int
    workspace: int
    exchanged: int
    host: int

    def replay(self, whole: Numbers, kept: Numbers) -> tuple[int, int]:
        """Bytes at the end of the forward pass, and at the peak.

        Args:
            whole: for each parameter, bytes of its gradient until it is complete.
            kept: for each parameter, bytes of its gradient once it is complete: FSDP2's shard, or 0 if the optimizer's
                step in the backward pass frees it.
        """
        numbers = np.array(list(self.complete), dtype=np.int64)
        changes = np.where(self.parameters >= 0, np.sign(self.changes) * whole[self.parameters], self.changes)
        np.add.at(changes, list(self.complete.values()), (kept - whole)[numbers])
        held = changes.cumsum()
        end = int(held[self.forward - 1])
        return end, max(int(held.max()) + self.exchanged, end + self.workspace)


def trace(
    model: CausalLM,
    batch_size: int,
    seq_len: int,
    *,
    shares: Shares,
    context: int,
    load: float,
    workspace: int,
    several: bool,
    reference: nn.Module | None = None,
) -> Trace:
    """Trace the step of rank 0, without FSDP2. Gradients of the model are cleared.

    Args:
        model: the model, on the meta device.
        batch_size: sequences.
        seq_len: tokens per sequence.
        shares: the rank's shard of each parameter, by tensor and expert parallelism.
        context: ranks that each sequence is divided over.
        load: tokens that the rank's experts receive, relative to perfect balance.
        workspace: largest number of bytes that the head's loss takes.
        several: whether there are several processes; then float8 copies of frozen weights are not kept.
        reference: a second model that the step runs, whose parameters are not counted.
    """
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device="meta")
    exchanged, itemsize = 0, (shares.param_dtype or model.dtype).itemsize
    if shares.tensor > 1:
        model = tensor_part(model, FirstRank(shares.tensor))
        linears = modules_of(model.decoder.blocks, Linear)
        fused = any(linear.compute is None and linear.update is None for linear in linears)  # the others are traced
        if fused and model.decoder._sequence_mesh is not None:
            exchanged = 2 * ids.numel() // context * model.config.hidden_size * itemsize
        shares = Shares(model, param_dtype=shares.param_dtype)
    computes: list[Compute] = modules_of(model, Compute)
    for compute in computes:
        compute.keeps_frozen = not several
    try:
        with _on_first_rank(model, shares, context, load), _Allocations(model, reference) as allocations:
            before = host_bytes()
            loss = cast(Tensor, model(ids, labels=ids).loss)
            forward, host = len(allocations.events), host_bytes() - before
            loss.backward()
            del loss
    finally:
        for compute in computes:
            compute.keeps_frozen = None
    model.zero_grad(set_to_none=True)
    storages, changes = np.array(allocations.events, dtype=np.int64).T
    parameter_of = np.full(storages.max() + 1, -1)
    parameter_of[list(allocations.gradients)] = [number for number, _ in allocations.gradients.values()]
    logits = ids.numel() // context * -(-model.config.vocab_size // shares.tensor) * itemsize
    complete = dict(allocations.gradients.values())
    return Trace(changes, parameter_of[storages], complete, forward, min(workspace, logits), exchanged, host)


def held_bytes(make: Callable[[], object]) -> int:
    """Bytes that the result of `make` holds of the memory that it allocates on the meta device."""
    with _Allocations(nn.Module(), None) as allocations:
        kept = make()
        held = sum(change for _, change in allocations.events)
    del kept
    return held


@contextmanager
def _on_first_rank(model: CausalLM, shares: Shares, context: int, load: float) -> Iterator[None]:
    """Context manager: the model holds rank 0's shards of its parameters, and runs on rank 0's part of each sequence.

    On the meta device ranks exchange nothing."""
    if context > 1:
        check_context_parallel(model.decoder, context)
    before = [(module, dict(module.named_parameters(recurse=False))) for module in model.modules()]
    parts: dict[int, nn.Parameter] = {}  # by the id of the whole parameter
    for share in shares:
        old = share.parameter
        parts[id(old)] = nn.Parameter(torch.empty(share.shape, dtype=share.dtype, device="meta"), old.requires_grad)
    try:
        for module, own in before:
            for name, parameter in own.items():
                module.register_parameter(name, parts[id(parameter)])
        for mixture in shares.mixtures:
            mixture._expert_mesh = FirstRank(shares.expert, load)
        if context > 1:
            model.decoder._context_mesh = FirstRank(context)
        yield
    finally:
        model.decoder._context_mesh = None
        for mixture in shares.mixtures:
            mixture._expert_mesh = None
        for module, own in before:
            for name, parameter in own.items():
                module.register_parameter(name, parameter)


@dataclass(frozen=True)
class FirstRank:
    """Stands in for a mesh of this number of `ranks`, without processes; this is rank 0. `load`: see `trace`."""

    ranks: int
    load: float = 1.0

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return 0

    def get_group(self) -> FirstRank:
        return self

    @property
    def group_name(self) -> str:
        return "none"


class _Allocations(TorchDispatchMode):
    """While active, records the storages that ops allocate on the meta device, and when they are released."""

    def __init__(self, model: nn.Module, reference: nn.Module | None) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.gradients: dict[int, tuple[int, int]] = {}  # storage number -> parameter number, event
        self._numbers: dict[int, int] = {}  # id of a storage -> its number
        self._allocated = 0
        self._parameters = list(model.parameters())
        others = [] if reference is None else list(reference.parameters())
        self._known = {p.untyped_storage()._cdata for p in (*self._parameters, *others)}

    def __enter__(self) -> _Allocations:
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p, i=i: self._complete(i, p))
            for i, parameter in enumerate(self._parameters)
            if parameter.requires_grad
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = host_code(op)
        if function is None:
            results = op(*args, **(kwargs or {}))
        else:  # its buffers are counted too
            super().__enter__()
            try:
                results = function(*args, **(kwargs or {}))
            finally:
                super().__exit__(None, None, None)
        for result in tree_iter(results):
            if isinstance(result, Tensor) and result.is_meta:
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._numbers and key not in self._known:
            self._numbers[key] = self._allocated
            self._allocated += 1
            self.events.append((self._numbers[key], size))
            weakref.finalize(storage, self._released, key, size)

    def _released(self, key: int, size: int) -> None:
        self.events.append((self._numbers.pop(key), -size))

    def _complete(self, index: int, parameter: Tensor) -> None:
        """Hook that runs once the gradient of parameter number `index` has been accumulated."""
        if parameter.grad is not None:
            number = self._numbers.get(parameter.grad.untyped_storage()._cdata)
            if number is None:
                raise InputError(f"model: the gradient of parameter {index} is no tensor of the backward pass")
            self.gradients[number] = index, len(self.events) - 1
