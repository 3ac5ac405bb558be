"""The numbers of an AdamW step for CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch

from ligermodels.ops.optimizer.adamw import adamw_key, adamw_numbers, adamw_step_in_memory
from ligermodels.training.fused_adamw import FusedAdamW


class GraphNumbers:
    """The numbers of AdamW that change from step to step, in the device's memory, for a CUDA graph of a step.

    Call `advance` before each replay, and use it as a context around the `step` that is recorded.

    Args:
        optimizer: an optimizer of parameters that are not sharded. The graph updates those that have a gradient now.
    """

    def __init__(self, optimizer: FusedAdamW) -> None:
        self._optimizer = optimizer
        self._updated = [each for each in optimizer.indexed_parameters() if each[2].grad is not None]
        for _, _, parameter in self._updated:
            optimizer.start_state(parameter)
        self._rows = {index: row for row, (index, _, _) in enumerate(self._updated)}
        device = self._updated[0][2].device
        # Rows of 16 bytes and more: kernels are compiled for tensors that begin at a multiple of 16.
        self._numbers = torch.zeros(len(self._updated), 4, dtype=torch.float64, device=device)
        self._keys = torch.zeros(len(self._updated), 2, dtype=torch.int64, device=device)

    def advance(self) -> None:
        """Count a step of each updated parameter, and write its numbers to the device."""
        numbers, keys = [], []
        for index, group_index, parameter in self._updated:
            group, state = self._optimizer.param_groups[group_index], self._optimizer.state[parameter]
            state["step"] += 1
            step, seeds = int(state["step"]), self._optimizer.rounding_seeds(index)
            numbers.append([*adamw_numbers(step, float(group["lr"]), group["betas"], group["weight_decay"]), 0.0])
            keys.append([0 if seeds is None else adamw_key(seeds, step), 0])
        for target, rows in ((self._numbers, numbers), (self._keys, keys)):
            source = torch.tensor(rows, dtype=target.dtype)
            target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)

    def of(self, index: int) -> dict[str, Any]:
        """The numbers and the key of the parameter of this index."""
        row, seeds = self._rows[index], self._optimizer.rounding_seeds(index)
        return {"numbers": self._numbers[row], "key": None if seeds is None else self._keys[row]}

    def warm_up(self) -> None:
        """Compile the kernels of the step, on copies of parameters: one for each shape and dtype."""
        seen = set()
        for index, group_index, parameter in self._updated:
            key = (parameter.shape, parameter.dtype, group_index)
            if key not in seen:
                seen.add(key)
                group, state = self._optimizer.param_groups[group_index], self._optimizer.state[parameter]
                p, g, m, v = map(torch.zeros_like, (parameter, parameter, state["exp_avg"], state["exp_avg_sq"]))
                adamw_step_in_memory(p, g, m, v, **self.of(index), betas=group["betas"], eps=group["eps"])

    def __enter__(self) -> None:
        self._optimizer.graph_numbers = self

    def __exit__(self, *_: object) -> None:
        self._optimizer.graph_numbers = None
