"""Memory of a training step, found without a GPU: the step of a model on the meta device, byte by byte."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import nn

from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import Compute
from ligermodels.models.causal_lm import CausalLM
from ligermodels.parallel.shares import Share, Shares
from ligermodels.parallel.trace import Trace, trace

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
    expert: int = 1,
    expert_load: float = 1.0,
    optimizer: str = "adamw",
) -> StepMemory:
    """The memory of a step of `model`, which is on the meta device, over `batch_size` sequences of `seq_len` tokens on
    each GPU, with `activation_checkpointing` as the model has it and the parameters that require a gradient.

    Forward and backward pass run on tensors without data, and each allocation and release is counted; so any model can
    be asked about. Degrees are those of a `ParallelPlan`: sequences are divided over `context` ranks; projections and,
    between these, tokens over `tensor`, and experts over `expert` of them; parameters, gradients and optimizer states
    over `shard` times `context`, as by FSDP2 by block, which divides rows: of 128 experts no rank has less than one.
    Not counted: the CUDA context (about 0.5 GiB), NCCL's buffers, fragmentation.

    expert_load: rows that come to the experts of a rank, relative to an equal part of all: 1 where routers balance
    perfectly; at worst `expert`, where all tokens of all ranks choose experts of this one.

    Gradients of the model are cleared. Raises InputError for a model that is not on the meta device, and numbers out of
    range; ConfigError, naming it, for what cannot be divided so.
    """
    step = StepTrace(model, batch_size, seq_len, context=context, tensor=tensor, expert=expert, expert_load=expert_load)
    return step.memory(shard=shard, optimizer=optimizer)


class StepTrace:
    """A step that has been followed once, and its memory by what divides parameters alone; arguments and errors as of
    `step_memory`."""

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
        self.shares = Shares(model, tensor=tensor, expert=expert)
        self._in_float8 = any(isinstance(module, Compute) and not module.holds_weight for module in model.modules())
        self._trace = functools.cache(
            partial(
                trace, model, batch_size, seq_len, shares=self.shares, context=context, load=expert_load,
                workspace=LOSS_WORKSPACE,
            )
        )  # fmt: skip
        self._traced(context)  # which raises now

    def _traced(self, divided: int) -> Trace:
        return self._trace(several=self._in_float8 and divided * self.shares.tensor > 1)

    def memory(self, *, shard: int = 1, expert: int | None = None, optimizer: str = "adamw") -> StepMemory:
        """With so many shards, and experts over another number of ranks: where they are spread, as many rows come to
        a rank by any number of them."""
        if shard < 1:
            raise InputError(f"shard: must be at least 1, got {shard}")
        shares, divided = self.shares, shard * self.context
        if expert is not None and expert != shares.expert:
            if 1 in (expert, shares.expert):
                raise InputError(f"expert: the step was followed with {shares.expert}; follow it anew with {expert}")
            shares = Shares(self.model, expert=expert)
        if divided % shares.expert:
            raise ConfigError(f"expert: {shares.expert} does not divide the {divided} ranks (shard x context)")

        def kept(share: Share) -> int:
            return share.sharded(divided // shares.expert if share.of_experts else divided)

        sharded = [kept(share) for share in shares]
        activations, peak = self._traced(divided).replay(
            np.array([share.nbytes for share in shares]), np.array(sharded)
        )
        states = (_state_bytes(s.parameter, kept(s), optimizer) for s in shares if s.parameter.requires_grad)
        return StepMemory(
            weights=sum(sharded),
            optimizer_states=sum(states),
            gathered=_gathered(self.model, shares) if divided > 1 else 0,
            activations=activations,
            backward=peak - activations,
        )


def _state_bytes(parameter: nn.Parameter, kept: int, optimizer: str) -> int:
    """AdamW keeps two moments in the parameter's dtype; Adafactor a row and a column of each matrix."""
    if optimizer == "adamw":
        return 2 * kept
    if optimizer == "adafactor":
        if kept < parameter.nbytes:
            raise ConfigError("optimizer: adafactor does not work on sharded parameters; use adamw")
        rows = parameter.numel() if parameter.ndim < 2 else sum(parameter.shape[-2:]) * parameter.shape[:-2].numel()
        return rows * parameter.itemsize
    raise InputError(f"optimizer: must be 'adamw' or 'adafactor', got {optimizer!r}")


def _gathered(model: CausalLM, shares: Shares) -> int:
    """Whole parameters of the units in work, and the whole gradients of one of them."""
    units: list[nn.Module] = [*model.decoder.blocks, model.decoder.embed, model.head]
    largest = max(sum(share.nbytes for share in shares.of(unit)) for unit in units)
    trained = max(sum(s.nbytes for s in shares.of(unit) if s.parameter.requires_grad) for unit in units)
    return GATHERED_UNITS * largest + trained
