"""Memory of a training step, found without a GPU: the step of a model on the meta device, byte by byte."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ligermodels.archs.causal_lm import CausalLM
from ligermodels.archs.decoder import Decoder
from ligermodels.errors import InputError
from ligermodels.layers.context_parallel import check_context_parallel
from ligermodels.parallel.tensor_part import tensor_part

LOSS_WORKSPACE = 2**30
"""Bytes for logits of a chunk, the `memory_budget` of `ops.linear_cross_entropy`."""
GATHERED_UNITS = 2
"""Units whose whole parameters FSDP2 holds at once: the one that computes, and the next."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes on each GPU at the peak of a training step, as `torch.cuda.max_memory_allocated` counts them.

    `weights` and `optimizer_states` are there all the time; `gathered` are whole parameters and gradients of the units
    that FSDP2 has in work. `activations` are those at the end of the forward pass, and `backward` what the peak has
    beyond all others: gradients, and what the backward pass computes with.
    """

    weights: int
    optimizer_states: int
    gathered: int
    activations: int
    backward: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.optimizer_states + self.gathered + self.activations + self.backward


def step_memory(
    model: CausalLM,
    batch_size: int,
    seq_len: int,
    *,
    shard: int = 1,
    context: int = 1,
    tensor: int = 1,
    optimizer: str = "adamw",
) -> StepMemory:
    """The memory of a step of `model`, which is on the meta device, over `batch_size` sequences of `seq_len` tokens on
    each GPU, or divided over `context` of them, with `activation_checkpointing` as the model has it and the parameters
    that require a gradient.

    Forward and backward pass run on tensors without data, and each allocation and release is counted; so any model can
    be asked about. With `shard` times `context` ranks, parameters, gradients and optimizer states are divided by them,
    as by FSDP2 by block. With `tensor` ranks, each has its part of every layer and, between projections, of the tokens.
    Not counted: the CUDA context (about 0.5 GiB), NCCL's buffers, fragmentation.

    Gradients of the model are cleared. Raises InputError for a model that is not on the meta device, and sizes below 1;
    ConfigError for one that cannot be divided so.
    """
    parameters = list(model.parameters())
    if not all(parameter.is_meta for parameter in parameters):
        raise InputError('model: must be on the meta device: make it by from_config(config, device="meta")')
    sizes = {"batch_size": batch_size, "seq_len": seq_len, "shard": shard, "context": context, "tensor": tensor}
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"{name}: must be at least 1, got {value}")
    if tensor > 1:
        model = tensor_part(model, _FirstRank(tensor))
        parameters = list(model.parameters())
    shard *= context
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device="meta")
    with _divided(model.decoder, context), _Allocations(parameters, shard) as allocations:
        loss = cast(Tensor, model(ids, labels=ids).loss)
        kept = allocations.now
        head_peak = kept + min(
            LOSS_WORKSPACE, ids.numel() // context * model.config.vocab_size * model.head.weight.itemsize
        )
        loss.backward()
        del loss
    peak = max(allocations.peak, head_peak)
    model.zero_grad(set_to_none=True)
    return StepMemory(
        weights=_bytes(parameters) // shard,
        optimizer_states=sum(_state_bytes(p, optimizer) for p in parameters if p.requires_grad) // shard,
        gathered=_gathered(model) if shard > 1 else 0,
        activations=kept,
        backward=peak - kept,
    )


@contextmanager
def _divided(decoder: Decoder, context: int) -> Iterator[None]:
    """Within it `decoder` has the part of each sequence that the first of `context` ranks has; nothing is exchanged on
    the meta device."""
    if context > 1:
        check_context_parallel(decoder)
        decoder._context_mesh = _FirstRank(context)
    try:
        yield
    finally:
        decoder._context_mesh = None


@dataclass(frozen=True)
class _FirstRank:
    """What `layers.context_parallel` asks of a mesh, without ranks."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return 0

    def get_group(self) -> _FirstRank:
        return self

    @property
    def group_name(self) -> str:
        return "none"


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _state_bytes(parameter: nn.Parameter, optimizer: str) -> int:
    """AdamW keeps two moments in the parameter's dtype; Adafactor a row and a column of each matrix."""
    if optimizer == "adamw":
        return 2 * parameter.nbytes
    if optimizer == "adafactor":
        rows = parameter.numel() if parameter.ndim < 2 else sum(parameter.shape[-2:]) * parameter.shape[:-2].numel()
        return rows * parameter.itemsize
    raise InputError(f"optimizer: must be 'adamw' or 'adafactor', got {optimizer!r}")


def _gathered(model: CausalLM) -> int:
    """Whole parameters of the units in work, and the whole gradients of one of them."""
    units: list[nn.Module] = [*model.decoder.blocks, model.decoder.embed, model.head]
    largest = max(_bytes(unit.parameters()) for unit in units)
    trained = max(_bytes(p for p in unit.parameters() if p.requires_grad) for unit in units)
    return GATHERED_UNITS * largest + trained


class _Allocations(TorchDispatchMode):
    """Counts the bytes of storages that ops make on the meta device while it is active, until they are released.

    `now`, and `peak`, the most so far. Gradients that have been accumulated count with their share of `shard` ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], shard: int) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._shard = shard
        self._sizes: dict[int, int] = {}  # by storage
        self._parameters = [p for p in parameters if p.requires_grad]
        self._known = {p.untyped_storage()._cdata for p in parameters}

    def __enter__(self) -> _Allocations:
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._parameters]
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
        key = storage._cdata
        if key not in self._sizes and key not in self._known:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._released, key)
            self._change(storage.nbytes())

    def _released(self, key: int) -> None:
        self._change(-self._sizes.pop(key))

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            key = parameter.grad.untyped_storage()._cdata
            whole = self._sizes.get(key, 0)
            share = min(whole, -(-parameter.nbytes // self._shard))
            self._sizes[key] = share
            self._change(share - whole)

    def _change(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
