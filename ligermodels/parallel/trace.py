"""What a training step of one rank allocates and releases, in order, found on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
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
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.shares import Shares
from ligermodels.parallel.tensor_part import tensor_part

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Trace:
    """Allocations of a forward and backward pass.

    changes: bytes allocated (or, below 0, released) at each event. places: of storages that become gradients the place
    of their parameter in the model, else -1. complete: for each trained parameter's place, the event at which its
    gradient has been accumulated. forward: events of the forward pass. workspace: bytes that the head's loss takes at
    its end. exchanged: bytes of hidden states that tensor-parallel ranks gather, and are to sum, at once, within
    an op.
    """

    changes: Numbers
    places: Numbers
    complete: dict[int, int]
    forward: int
    workspace: int
    exchanged: int

    def replay(self, whole: Numbers, kept: Numbers) -> tuple[int, int]:
        """Bytes at the end of the forward pass, and at the peak, where the gradients of all parameters have the bytes
        `whole`, and `kept` of them from when they are complete."""
        places = np.array(list(self.complete), dtype=np.int64)
        of_gradients = self.places >= 0
        changes = np.where(of_gradients, np.sign(self.changes) * whole[self.places], self.changes)
        np.add.at(changes, list(self.complete.values()), (kept - whole)[places])
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
) -> Trace:
    """The step of the first rank over `batch_size` sequences of `seq_len` tokens, without FSDP2.

    Args:
        shares: what the rank has of each parameter, by tensor and expert parallelism.
        context: ranks that each sequence is divided over.
        load: rows that come to the rank's experts, relative to an equal part of all.
        workspace: the most bytes that the head's loss takes.
        several: whether it runs in several processes, where float8 forms of frozen weights are not kept.

    Gradients of the model are cleared.
    """
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device="meta")
    exchanged = 0
    if shares.tensor > 1:
        model = tensor_part(model, FirstRank(shares.tensor))
        linears = [module for module in model.decoder.blocks.modules() if isinstance(module, Linear)]
        fused = any(linear.compute is None and linear.update is None for linear in linears)  # the others are traced
        if fused and model.decoder._token_mesh is not None:
            exchanged = 2 * ids.numel() // context * model.config.hidden_size * model.dtype.itemsize
        shares = Shares(model)
    computes = [module for module in model.modules() if isinstance(module, Compute)]
    for compute in computes:
        compute.keeps_frozen = not several
    try:
        with _on_first_rank(model, shares, context, load), _Allocations(model) as allocations:
            loss = cast(Tensor, model(ids, labels=ids).loss)
            forward = len(allocations.events)
            loss.backward()
            del loss
    finally:
        for compute in computes:
            compute.keeps_frozen = None
    model.zero_grad(set_to_none=True)
    storages, changes = np.array(allocations.events, dtype=np.int64).T
    place_of = np.full(storages.max() + 1, -1)
    place_of[list(allocations.gradients)] = [place for place, _ in allocations.gradients.values()]
    logits = ids.numel() // context * -(-model.config.vocab_size // shares.tensor) * model.dtype.itemsize
    complete = dict(allocations.gradients.values())
    return Trace(changes, place_of[storages], complete, forward, min(workspace, logits), exchanged)


@contextmanager
def _on_first_rank(model: CausalLM, shares: Shares, context: int, load: float) -> Iterator[None]:
    """Within it the model has what the first rank has of its parameters, and of each sequence; nothing is exchanged on
    the meta device."""
    if context > 1:
        check_context_parallel(model.decoder)
    before = [(module, dict(module.named_parameters(recurse=False))) for module in model.modules()]
    parts: dict[int, nn.Parameter] = {}  # by the id of the whole one
    for share in shares:
        old = share.parameter
        parts[id(old)] = nn.Parameter(torch.empty(share.shape, dtype=old.dtype, device="meta"), old.requires_grad)
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
    """What layers ask of a mesh, without ranks. load: see `trace`."""

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
    """Notes the storages that ops make on the meta device while it is active, and when they are released."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.gradients: dict[int, tuple[int, int]] = {}
        self._numbers: dict[int, int] = {}  # of storages
        self._made = 0
        self._parameters = list(model.parameters())
        self._known = {p.untyped_storage()._cdata for p in self._parameters}

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
        results = op(*args, **(kwargs or {}))
        for result in tree_iter(results):
            if isinstance(result, Tensor) and result.is_meta:
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._numbers and key not in self._known:
            self._numbers[key] = self._made
            self._made += 1
            self.events.append((self._numbers[key], size))
            weakref.finalize(storage, self._released, key, size)

    def _released(self, key: int, size: int) -> None:
        self.events.append((self._numbers.pop(key), -size))

    def _complete(self, place: int, parameter: Tensor) -> None:
        """A gradient has been accumulated."""
        if parameter.grad is not None:
            number = self._numbers.get(parameter.grad.untyped_storage()._cdata)
            if number is None:
                raise InputError(f"model: the gradient of parameter {place} is no tensor of the backward pass")
            self.gradients[number] = place, len(self.events) - 1
