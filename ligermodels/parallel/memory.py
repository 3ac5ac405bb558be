"""Memory of a training step, found without a GPU: a model runs the step on the meta device, and bytes are counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
from torch import nn

from ligermodels.arguments import OptimizerName, check_count
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import Compute
from ligermodels.layers.modules import modules_of
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.hidden_matrices import hidden_matrices
from ligermodels.ops.optimizer.blockwise import num_blocks
from ligermodels.ops.runtime.tensors import dtype_named
from ligermodels.parallel.fsdp import check_one_unit
from ligermodels.parallel.plan import DtypeName, FsdpUnit
from ligermodels.parallel.shares import Share, Shares
from ligermodels.parallel.trace import Trace, trace

LOSS_WORKSPACE = 2**30
"""Bytes for the logits of a chunk: the `memory_budget` of `ops.linear_cross_entropy`."""
GATHERED_UNITS = 2
"""Units that FSDP2 keeps gathered at once: the unit that computes, and the next."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes on each GPU at the peak of a training step, as `torch.cuda.max_memory_allocated` counts them.

    Args:
        weights: parameters.
        optimizer_states: states of the optimizer.
        gathered: whole parameters of the units that FSDP2 keeps gathered, and gradients that it sums over ranks.
        activations: activations at the end of the forward pass.
        backward: rest of the peak: gradients, also of earlier passes of the step, and temporary tensors of the backward
            pass.
        reference: parameters of a second, frozen model: a teacher, or the model before training.
        host: page-locked host memory for each GPU, of "offload" checkpointing; no part of the total.
    """

    weights: int
    optimizer_states: int
    gathered: int
    activations: int
    backward: int
    reference: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts on the GPU."""
        return sum(vars(self).values()) - self.host


def step_memory(
    model: CausalLM,
    batch_size: int,
    seq_len: int,
    *,
    replicate: int = 1,
    shard: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
    expert_load: float = 1.0,
    param_dtype: DtypeName | None = None,
    reshard_after_forward: bool = True,
    fsdp_unit: FsdpUnit = "block",
    reduce_dtype: DtypeName | None = None,
    optimizer: OptimizerName = "adamw",
    optimizer_in_bwd: bool = False,
    passes: int = 1,
) -> StepMemory:
    """Memory of a training step on each GPU.

    Forward and backward pass run on the meta device, and all allocations and releases are counted, so this works for
    any model. The model's `activation_checkpointing` and `requires_grad` count; its gradients are cleared. Not counted
    are the CUDA context (about 0.5 GiB), NCCL's buffers and fragmentation.

    Args:
        model: the model, on the meta device.
        batch_size: sequences per forward pass of a group of `context` x `tensor` ranks.
        seq_len: tokens per sequence.
        replicate: groups of ranks that each hold the whole model.
        shard: ranks that parameters, gradients and optimizer states are sharded over (times `context`), as FSDP2 shards
            the rows of each block. A parameter of 128 experts is divided over at most 128 ranks.
        context: ranks that each sequence is divided over.
        tensor: ranks that projections, and tokens between projections, are divided over.
        expert: ranks that experts are divided over, out of shard x context.
        expert_load: tokens that a rank's experts receive, relative to perfect balance; from 1 to `expert` (all tokens
            of all ranks go to this rank's experts).
        param_dtype: dtype of gathered parameters and of the computation, as in `ParallelPlan`.
        reshard_after_forward: whether FSDP2 shards blocks again after their forward pass, as in `ParallelPlan`.
        fsdp_unit: what FSDP2 gathers at once, as in `ParallelPlan`.
        reduce_dtype: dtype of sums of gradients over ranks, as in `ParallelPlan`.
        optimizer: "adamw", "adamw8bit", "muon", "muon8bit", or on unsharded parameters "adafactor".
        optimizer_in_bwd: whether the backward pass updates each parameter and frees its gradient.
        passes: forward passes per step; see `StepTrace.memory`.

    Raises:
        InputError: the model is not on the meta device, or a number is out of range.
        ConfigError: the model cannot be divided in this way; the message names the degree.
    """
    step = StepTrace(
        model,
        batch_size,
        seq_len,
        context=context,
        tensor=tensor,
        expert=expert,
        expert_load=expert_load,
        param_dtype=param_dtype,
    )
    return step.memory(
        replicate=replicate,
        shard=shard,
        reshard_after_forward=reshard_after_forward,
        fsdp_unit=fsdp_unit,
        reduce_dtype=reduce_dtype,
        optimizer=optimizer,
        optimizer_in_bwd=optimizer_in_bwd,
        passes=passes,
    )


class StepTrace:
    """A training step that has been traced once. `memory` then gives its memory for different numbers of shards.

    Args:
        model: the model, on the meta device.
        batch_size: sequences per forward pass of a group of `context` x `tensor` ranks.
        seq_len: tokens per sequence.
        context: ranks that each sequence is divided over.
        tensor: ranks that projections, and tokens between projections, are divided over.
        expert: ranks that experts are divided over.
        expert_load: tokens that a rank's experts receive, relative to perfect balance; from 1 to `expert`.
        param_dtype: dtype of gathered parameters and of the computation, as in `ParallelPlan`.
        reference: a second model that the step runs, whose parameters are no allocations of the step.

    Raises:
        InputError: the model is not on the meta device, or a number is out of range.
        ConfigError: the model cannot be divided in this way; the message names the degree.
    """

    def __init__(
        self,
        model: CausalLM,
        batch_size: int,
        seq_len: int,
        *,
        context: int = 1,
        tensor: int = 1,
        expert: int = 1,
        expert_load: float = 1.0,
        param_dtype: DtypeName | None = None,
        reference: nn.Module | None = None,
    ) -> None:
        if not all(parameter.is_meta for parameter in model.parameters()):
            raise InputError('model: must be on the meta device: make it by from_config(config, device="meta")')
        sizes = {"batch_size": batch_size, "seq_len": seq_len}
        for name, value in {**sizes, "context": context, "tensor": tensor, "expert": expert}.items():
            if value < 1:
                raise InputError(f"{name}: must be at least 1, got {value}")
        if not 1 <= expert_load <= expert:
            raise InputError(f"expert_load: must be from 1, balanced, to expert, {expert}, got {expert_load}")
        self.model, self.context = model, context
        dtype = dtype_named(param_dtype)
        self.shares = Shares(model, tensor=tensor, expert=expert, param_dtype=dtype)
        self._in_float8 = any(not compute.holds_weight for compute in modules_of(model, Compute))
        self._trace = functools.cache(
            partial(
                trace, model, batch_size, seq_len, shares=self.shares, context=context, load=expert_load,
                workspace=LOSS_WORKSPACE, reference=reference,
            )
        )  # fmt: skip
        self._traced(context)  # raises errors of the model now

    @functools.cached_property
    def _hidden(self) -> set[int]:
        """Ids of the parameters that Muon orthogonalises."""
        return {id(parameter) for parameter in hidden_matrices(self.model)}

    def _shares_over(self, divided: int, expert: int) -> Shares:
        """The shares of a rank of `divided`, with experts divided over `expert` ranks; errors as `memory`."""
        shares = self.shares
        if expert != shares.expert:
            if 1 in (expert, shares.expert):
                raise InputError(f"expert: the step was traced with {shares.expert}; trace it again with {expert}")
            shares = Shares(self.model, expert=expert, param_dtype=shares.param_dtype)
        if divided % expert:
            raise ConfigError(f"expert: {expert} does not divide the {divided} ranks (shard x context)")
        return shares

    def _traced(self, divided: int) -> Trace:
        return self._trace(several=self._in_float8 and divided * self.shares.tensor > 1)

    def memory(
        self,
        *,
        replicate: int = 1,
        shard: int = 1,
        expert: int | None = None,
        reshard_after_forward: bool = True,
        fsdp_unit: FsdpUnit = "block",
        reduce_dtype: DtypeName | None = None,
        optimizer: OptimizerName = "adamw",
        optimizer_in_bwd: bool = False,
        passes: int = 1,
    ) -> StepMemory:
        """Memory of the step on each GPU.

        Args:
            replicate: groups of ranks that each hold the whole model.
            shard: ranks that parameters, gradients and optimizer states are sharded over (times `context`).
            expert: ranks that experts are divided over, instead of the number that was traced. Both numbers must be
                above 1, or both 1: then a rank's experts receive the same number of tokens.
            reshard_after_forward: whether FSDP2 shards blocks again after their forward pass, as in `ParallelPlan`.
            fsdp_unit: what FSDP2 gathers at once, as in `ParallelPlan`.
            reduce_dtype: dtype of sums of gradients over ranks, as in `ParallelPlan`.
            optimizer: "adamw", "adamw8bit", "muon", "muon8bit", or on unsharded parameters "adafactor".
            optimizer_in_bwd: whether the backward pass updates each parameter and frees its gradient.
            passes: forward passes per step. From the second one on, all gradients of the passes before are in memory
                beside the activations.

        Raises:
            InputError: a number is out of range, the optimizer is unknown, or several passes with `optimizer_in_bwd`.
            ConfigError: `expert` does not divide shard x context, Adafactor on sharded parameters, or an `fsdp_unit`
                that this model cannot have.
        """
        for name, number in (("replicate", replicate), ("shard", shard), ("passes", passes)):
            check_count(name, number)
        _check_optimizer(optimizer, optimizer_in_bwd, passes)
        divided = shard * self.context
        shares = self._shares_over(divided, self.shares.expert if expert is None else expert)
        if fsdp_unit == "model":
            degrees = {"replicate": replicate, "shard": shard, "context": self.context, "expert": shares.expert}
            check_one_unit(self.model, degrees, None if shares.param_dtype is None else str(shares.param_dtype))

        def ranks(share: Share) -> int:
            return divided // shares.expert if share.of_experts else divided

        def gathered(unit: Iterable[Share]) -> list[Share]:
            cast = shares.param_dtype is not None
            return [share for share in unit if cast or replicate * ranks(share) > 1]

        def summed(share: Share) -> int:
            return share.summed(ranks(share), dtype_named(reduce_dtype))

        units: list[nn.Module] = [*self.model.decoder.blocks, self.model.decoder.embed, self.model.head]
        if fsdp_unit == "model":
            whole = _gathered_at_once(gathered(shares), summed)
        else:
            whole = _gathered([gathered(shares.of(unit)) for unit in units], summed, reshard_after_forward)
        sharded = [share.sharded(ranks(share)) for share in shares]
        traced = self._traced(divided)
        kept, accumulated = _kept(np.array(sharded), traced, optimizer_in_bwd, passes)
        activations, peak = traced.replay(np.array([share.nbytes for share in shares]), kept)
        states = (
            state_bytes(
                s.parameter, s.shape[-1] if s.shape else 1, s.sharded(ranks(s)), optimizer,
                orthogonalized=optimizer.startswith("muon") and id(s.parameter) in self._hidden,
            )
            for s in shares
            if s.parameter.requires_grad
        )  # fmt: skip
        return StepMemory(
            weights=sum(sharded),
            optimizer_states=sum(states),
            gathered=whole,
            activations=activations,
            backward=peak - activations + accumulated,
            host=traced.host,
        )


def _check_optimizer(optimizer: str, in_backward: bool, passes: int) -> None:
    if optimizer not in get_args(OptimizerName):
        raise InputError(f"optimizer: must be one of {', '.join(get_args(OptimizerName))}, got {optimizer!r}")
    if in_backward and passes > 1:
        raise InputError(f"passes: is {passes}, and optimizer_in_bwd takes one pass per step")


def _kept(sharded: Any, traced: Trace, optimizer_in_bwd: bool, passes: int) -> tuple[Any, int]:
    """Bytes of the gradient that the last pass adds for each parameter of the bytes `sharded`, and of all gradients of
    the passes before, to which it adds its own."""
    if passes > 1:
        return np.zeros_like(sharded), int(sharded[list(traced.complete)].sum())
    return np.zeros_like(sharded) if optimizer_in_bwd else sharded, 0


def _gathered(units: list[list[Share]], summed: Callable[[Share], int], reshard_after_forward: bool) -> int:
    """Bytes of the whole parameters of GATHERED_UNITS units, or of all blocks and another unit, and of the gradients of
    one unit while they are summed.

    Args:
        units: the parameters of blocks, embedding and head that FSDP2 gathers.
        summed: bytes that the sum of a parameter's gradient takes.
        reshard_after_forward: as in `ParallelPlan`.
    """
    sizes = [sum(share.nbytes for share in unit) for unit in units]
    whole = GATHERED_UNITS * max(sizes)
    if not reshard_after_forward:
        whole = max(whole, sum(sizes[:-2]) + max(sizes[-2:]))
    trained = max(sum(summed(share) for share in unit if share.parameter.requires_grad) for unit in units)
    return whole + trained


def _gathered_at_once(unit: list[Share], summed: Callable[[Share], int]) -> int:
    """Bytes of a model that is one unit: all whole gradients, and the whole parameters or, when these are sharded
    again, the sums of the gradients.

    Args:
        unit: the parameters that FSDP2 gathers.
        summed: bytes that the sum of a parameter's gradient takes.
    """
    trained = [share for share in unit if share.parameter.requires_grad]
    sums = sum(map(summed, trained))
    return max(sum(share.nbytes for share in unit), sums) + sum(share.nbytes for share in trained)


def state_bytes(
    parameter: nn.Parameter, columns: int, kept: int, optimizer: OptimizerName, *, orthogonalized: bool
) -> int:
    """Bytes of the states of a parameter on a rank.

    AdamW has two moments, and Muon one for the matrices that it orthogonalises: in the dtype of the parameter, or of
    matrices in 8 bits with a float32 scale for every 256 columns. Adafactor has a row and a column per matrix.

    Args:
        parameter: the whole parameter.
        columns: size of the last dimension of its shard.
        kept: bytes of its shard.
        optimizer: name of the optimizer.
        orthogonalized: whether Muon orthogonalises it, see `hidden_matrices`.

    Raises:
        ConfigError: Adafactor on a sharded parameter.
    """
    if optimizer == "adafactor":
        if kept < parameter.nbytes:
            raise ConfigError("optimizer: adafactor does not work on sharded parameters; use adamw")
        rows = parameter.numel() if parameter.ndim < 2 else sum(parameter.shape[-2:]) * parameter.shape[:-2].numel()
        return rows * parameter.itemsize
    moments = 1 if orthogonalized and optimizer.startswith("muon") else 2
    if not optimizer.endswith("8bit") or parameter.ndim < 2:
        return moments * kept
    elements = kept // parameter.itemsize
    return moments * (elements + 4 * (elements // max(1, columns)) * num_blocks(columns))
