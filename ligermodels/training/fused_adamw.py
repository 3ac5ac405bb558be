"""AdamW on the project's own kernel, after the backward pass or inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ligermodels.ops import adamw_step


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` in one launch a parameter, at the memory's own speed; the same states and state dict.

    Sharded parameters (DTensor) are updated shard by shard. No amsgrad, maximize or capturable.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what the closure does, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def step_in_backward(self) -> list[RemovableHandle]:
        """From now on each parameter is updated as soon as its gradient is complete, which is freed at once: gradients
        never exist all together. `step` is still called, for what counts steps, and finds nothing left to do.

        Not for gradients that are accumulated over several backward passes, clipped or scaled. Returns handles whose
        `remove` ends it.
        """

        def hook(group: dict[str, Any]) -> Callable[[Tensor], None]:
            def update(parameter: Tensor) -> None:
                self._update(parameter, group)
                parameter.grad = None

            return update

        return [
            parameter.register_post_accumulate_grad_hook(hook(group))
            for group in self.param_groups
            for parameter in group["params"]
        ]

    @torch.no_grad()
    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        state["step"] += 1
        adamw_step(
            *(_local(x) for x in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])),
            step=int(state["step"]),
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )


def _local(x: Any) -> Tensor:
    """This process's shard of a sharded tensor, or the tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x
