"""AdamW on the project's own kernel, after the backward pass or inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ligermodels.errors import InputError
from ligermodels.ops import adamw_step


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` in one launch a parameter, at the memory's own speed; the same states and state dict.

    Sharded parameters (DTensor) are updated shard by shard. No amsgrad, maximize or capturable.

    Parameters in bfloat16 may be rounded stochastically: up or down at random, right on average. Rounded to the
    nearest, as by torch, they lose every change of less than half a unit in the last place, a five hundredth of the
    weight, and with a high beta2 their second moments never fall. Other dtypes are rounded to the nearest either way.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int = 0,
    ) -> None:
        """
        Args:
            rounding: of parameters and states in bfloat16.
            seed: of "stochastic", with the step and the parameter's place: with the same ones it comes out the same,
                also after a `load_state_dict`, whose states do not hold it.

        Others are those of torch.optim.AdamW. Raises InputError for another rounding.
        """
        if rounding not in ("nearest", "stochastic"):
            raise InputError(f"rounding: must be 'nearest' or 'stochastic', got {rounding!r}")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.defaults |= {"rounding": rounding, "seed": seed}  # Not in the groups, which a state dict replaces.
        self._places: dict[Tensor, int] = {}

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
                    self._start(parameter)
                    self._update(parameter, group)
        return loss

    def step_in_backward(self) -> list[RemovableHandle]:
        """From now on each parameter is updated as soon as its gradient is complete, which is freed at once: gradients
        never exist all together. On a GPU this runs beside the rest of the backward pass, on a stream of its own, whose
        end the backward pass then waits for. `step` is still called, for what counts steps, and finds nothing left to
        do.

        Not for gradients that are accumulated over several backward passes, clipped or scaled. Returns handles whose
        `remove` ends it.
        """
        streams: dict[torch.device, torch.cuda.Stream] = {}

        def hook(group: dict[str, Any]) -> Callable[[Tensor], None]:
            def update(parameter: Tensor) -> None:
                self._start(parameter)
                if parameter.is_cuda:
                    if parameter.device not in streams:
                        streams[parameter.device] = torch.cuda.Stream(parameter.device)
                    self._update_on(streams[parameter.device], parameter, group)
                else:
                    self._update(parameter, group)
                parameter.grad = None

            return update

        return [
            parameter.register_post_accumulate_grad_hook(hook(group))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def _update_on(self, stream: torch.cuda.Stream, parameter: Tensor, group: dict[str, Any]) -> None:
        main = torch.cuda.current_stream(parameter.device)
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            self._update(parameter, group)
        _local(parameter.grad).record_stream(stream)  # Its memory stays until then.

        def join() -> None:
            torch.cuda.current_stream(parameter.device).wait_stream(stream)

        torch.autograd.Variable._execution_engine.queue_callback(join)  # Where the backward pass ends.

    @torch.no_grad()
    def _start(self, parameter: Tensor) -> None:
        """Make the states of a parameter that has none."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        if state["step"].device.type != "cpu":  # Torch's own, when fused, counts on the GPU; reading that would wait.
            state["step"] = state["step"].cpu()

    @torch.no_grad()
    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, stochastic = self.state[parameter], self.defaults["rounding"] == "stochastic"
        state["step"] += 1
        adamw_step(
            *(_local(x) for x in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])),
            step=int(state["step"]),
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            rounding_seeds=(self.defaults["seed"], self._place(parameter)) if stochastic else None,
        )

    def _place(self, parameter: Tensor) -> int:
        """Its place among all parameters, lest those of one shape be rounded alike."""
        if parameter not in self._places:
            self._places = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        return self._places[parameter]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._places = {}


def _local(x: Any) -> Tensor:
    """This process's shard of a sharded tensor, or the tensor itself."""
    return x.to_local() if hasattr(x, "to_local") else x
