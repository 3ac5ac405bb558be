"""Muon for hidden matrices, with AdamW for the other parameters, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ligermodels.arguments import check_number
from ligermodels.convert.shards import is_dtensor, local_box
from ligermodels.errors import InputError
from ligermodels.models.hidden_matrices import Rows, hidden_matrices
from ligermodels.ops.optimizer.muon import apply_update, momentum_step, newton_schulz
from ligermodels.ops.optimizer.rounding import rounding_key
from ligermodels.training.blockwise_state import CODES, average_of, local_tensor
from ligermodels.training.fused_adamw import FusedAdamW, shard_of
from ligermodels.training.parameter_groups import parameter_groups

AdjustLR = Literal["match_rms_adamw", "original"]
MOMENTUM, MOMENTUM_8 = "momentum_buffer", "momentum_m5"
"""Names in the state: torch's, and one for 8 bits, of which 5 are mantissa bits."""


def muon(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    state_bits: Literal[8] | None = None,
) -> Muon:
    """Muon for the hidden matrices of a model, AdamW for its other parameters.

    Args:
        model: a native model; make it sharded before. Parameters that require no gradient are left out.
        lr: learning rate of all parameters. The updates of matrices have the size of AdamW's.
        weight_decay: weight decay, for matrices only.
        momentum: decay rate of Muon's momentum.
        rounding: rounding of bfloat16 parameters.
        state_bits: 8: states of matrices have 8 bits per element. Default: None, they have the parameter's dtype.

    Returns:
        The optimizer.

    Raises:
        InputError: no parameter requires a gradient, or a number is out of range.

    Examples:
        >>> optimizer = muon(model, 2e-4)
        >>> schedule = lr_schedule(optimizer, "wsd", 1000, warmup_steps=40)
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups([(model.parameters(), lr)], weight_decay, names=names)
    matrices = hidden_matrices(model)
    return Muon(groups, lr=lr, matrices=matrices, momentum=momentum, rounding=rounding, state_bits=state_bits)


class Muon(FusedAdamW):
    """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) for `matrices`, AdamW for the others.

    A matrix gets the Newton-Schulz orthogonalisation of its momentum, computed as in `torch.optim.Muon`, and
    decoupled weight decay. A parameter may be a stack of matrices (experts), or consist of several matrices (q, k and
    v). Of sharded parameters (DTensor) each rank gathers the whole momentum of one parameter at a time, in bfloat16;
    experts that are sharded by expert are not gathered.

    Examples:
        >>> optimizer = Muon(model.parameters(), lr=2e-4, matrices=hidden_matrices(model))
        >>> model(input_ids, labels=input_ids).loss.backward()
        >>> optimizer.step()
    """

    _further: dict[nn.Parameter, _Matrices] = {}  # noqa: RUF012  (never changed)
    """Matrices that are in no group yet."""
    options_of_all = (*FusedAdamW.options_of_all, "matrices", "ns_steps", "adjust_lr_fn")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        matrices: Mapping[nn.Parameter, Rows],
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLR = "match_rms_adamw",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
        state_bits: Literal[8] | None = None,
    ) -> None:
        """
        Args:
            params: all parameters, or parameter groups.
            lr: learning rate.
            betas: AdamW: decay rates of the first and second moments.
            eps: AdamW: added to the square root of the second moment.
            weight_decay: decoupled weight decay, of all parameters of a group.
            matrices: the parameters that Muon updates, with the rows of each of their matrices: see `hidden_matrices`.
                They may be in groups that are added later.
            momentum: decay rate of the momentum. A group may have another, also from step to step, as in
                torch.optim.Muon: `group["momentum"] = 0.9`.
            nesterov: whether the momentum is Nesterov's; groups may differ.
            ns_steps: iterations of Newton-Schulz.
            adjust_lr_fn: factor of the learning rate of a matrix with A rows and B columns. "match_rms_adamw":
                0.2 sqrt(max(A, B)), for learning rates of AdamW (Liu et al., 2025, https://arxiv.org/abs/2502.16982).
                "original": sqrt(max(1, A / B)), for learning rates of about 0.02; give embeddings a group with another.
            rounding: rounding of bfloat16 parameters, of AdamW's states and of 8-bit states.
            seed: seed of "stochastic" rounding.
            state_bits: 8: the momentum, and AdamW's moments of matrices, have 8 bits per element. Default: None, they
                have the dtype of the parameter.

        Raises:
            InputError: a number is out of range, a name is unknown, a parameter in `matrices` has neither 2 nor 3
                dimensions, none of them is in `params`, or no parameter requires a gradient.
        """
        _check_momentum(momentum)
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise InputError(f"adjust_lr_fn: must be 'match_rms_adamw' or 'original', got {adjust_lr_fn!r}")
        super().__init__(params, lr, betas, eps, weight_decay, rounding=rounding, seed=seed, state_bits=state_bits)
        for parameter in matrices:
            if parameter.ndim not in (2, 3):
                raise InputError(f"matrices: must have 2 or 3 dimensions, one has shape {tuple(parameter.shape)}")
        # By index, and in the defaults, because copies of an optimizer take only its state, groups and defaults.
        self.defaults["matrices"] = {}
        self._further = {p: _Matrices(p, rows, ns_steps, adjust_lr_fn) for p, rows in matrices.items()}
        self._take_matrices()
        if matrices and not self.defaults["matrices"]:
            raise InputError(
                "matrices: none of these parameters is in params, so AdamW would update all; call hidden_matrices with "
                "the model whose parameters are trained, after it has been sharded"
            )
        self.defaults |= {"momentum": momentum, "nesterov": nesterov}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        _check_momentum(param_group.get("momentum", 0.0))
        self._take_matrices()

    def _take_matrices(self) -> None:
        """Note the matrices among the parameters by their indices."""
        for index, _, parameter in self.indexed_parameters():
            if (matrices := self._further.pop(cast(nn.Parameter, parameter), None)) is not None:
                self.defaults["matrices"][index] = matrices

    def step_in_backward(self) -> list[RemovableHandle]:
        """As `FusedAdamW.step_in_backward`. Raises InputError for sharded parameters, which every rank gathers."""
        if any(is_dtensor(parameter) for _, _, parameter in self.indexed_parameters()):
            raise InputError("step_in_backward: Muon gathers sharded parameters; call step after the backward pass")
        return super().step_in_backward()

    def new_state(self, parameter: Tensor, index: int) -> dict[str, Tensor]:
        if index not in self.defaults["matrices"]:
            return super().new_state(parameter, index)
        return self.new_average(MOMENTUM_8 if self.defaults["state_bits"] == 8 else MOMENTUM, parameter)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """As `FusedAdamW.check_state`. Raises InputError also for a momentum with codes of an earlier version."""
        super().check_state(state_dict)
        for group in state_dict["param_groups"]:
            _check_momentum(group.get("momentum", 0.0))
        if any(MOMENTUM + CODES in state for state in state_dict["state"].values()):
            raise InputError(
                f"{MOMENTUM + CODES}: is a momentum in 8 bits with the codes of an earlier version; its run cannot be "
                "continued by this one: start a new one from its weights"
            )

    def step_numbers(self, group: dict[str, Any], step: int, index: int) -> tuple[float, float, float]:
        matrices = self.defaults["matrices"].get(index)
        if matrices is None:
            return super().step_numbers(group, step, index)
        lr = float(group["lr"])
        return 1 - lr * group["weight_decay"], lr * matrices.factor, 1.0

    @torch.no_grad()
    def update_parameters(self, parameters: Sequence[tuple[int, Tensor]], group: dict[str, Any]) -> None:
        matrices = self.defaults["matrices"]
        if others := [each for each in parameters if each[0] not in matrices]:
            super().update_parameters(others, group)
        for index, parameter in parameters:
            if index in matrices:
                self._update_matrices(parameter, group, index)

    def _update_matrices(self, parameter: Tensor, group: dict[str, Any], index: int) -> None:
        """Muon's update of a parameter."""
        matrices = self.defaults["matrices"][index]
        state, seeds = self.state[parameter], self.rounding_seeds(index)
        numbers: Any
        key: Any
        if self.graph_numbers is not None:
            numbers, key = self.graph_numbers.of(index)
        else:
            state["step"] += 1
            step = int(state["step"])
            numbers, key = self.step_numbers(group, step, index), None if seeds is None else rounding_key(seeds, step)
        shard = None if key is None else shard_of(parameter)
        direction = momentum_step(
            local_tensor(parameter.grad),
            average_of(state, MOMENTUM if MOMENTUM in state else MOMENTUM_8),
            beta=group.get("momentum", self.defaults["momentum"]),
            nesterov=group.get("nesterov", self.defaults["nesterov"]),
            key=key,
            shard=shard,
        )
        update = matrices.orthogonalized(parameter, direction)
        apply_update(local_tensor(parameter), update, numbers=numbers, key=key, shard=shard)


class _Matrices:
    """The matrices of a parameter.

    Args:
        parameter: (rows, columns), or a stack (n, rows, columns).
        rows: row indices of each matrix.
        steps: iterations of Newton-Schulz.
        adjust_lr_fn: factor of the learning rate by the size of a matrix.
    """

    def __init__(self, parameter: Tensor, rows: Rows, steps: int, adjust_lr_fn: AdjustLR) -> None:
        columns, self._steps = parameter.shape[-1], steps
        self._rows = [part.to(local_tensor(parameter).device) for part in rows]
        factors = [_factor(len(part), columns, adjust_lr_fn) for part in rows]
        self.factor = max(factors)  # the factors of other matrices are relative to it
        self._factors = [factor / self.factor for factor in factors]

    def orthogonalized(self, parameter: Tensor, direction: Tensor) -> Tensor:
        """This rank's shard of the orthogonalised `direction`, of which `direction` is this rank's shard."""
        box = local_box(parameter) if is_dtensor(parameter) else None
        if box is None or box.sizes[-2:] == tuple(parameter.shape[-2:]):  # whole matrices
            return self._orthogonalized(direction)
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        if direction.dtype != torch.float64:
            direction = direction.bfloat16()  # as Newton-Schulz computes
        placed = parameter.device_mesh, parameter.placements
        whole = DTensor.from_local(
            direction, *placed, run_check=False, shape=parameter.shape, stride=parameter.stride()
        ).full_tensor()
        return box.of(self._orthogonalized(whole))

    def _orthogonalized(self, direction: Tensor) -> Tensor:
        if len(self._rows) == 1:
            return newton_schulz(direction, self._steps)
        parts = [newton_schulz(direction.index_select(-2, rows), self._steps) for rows in self._rows]
        result = torch.empty_like(direction, dtype=parts[0].dtype)
        for rows, part, factor in zip(self._rows, parts, self._factors, strict=True):
            result.index_copy_(-2, rows, part if factor == 1 else part * factor)
        return result


def _check_momentum(momentum: Any) -> None:
    if check_number("momentum", momentum) >= 1:
        raise InputError(f"momentum: must be below 1, got {momentum}")


def _factor(rows: int, columns: int, adjust_lr_fn: AdjustLR) -> float:
    return (
        0.2 * math.sqrt(max(rows, columns)) if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    )
