"""AdamW on the project's own kernel, after the backward pass or inside it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ligermodels.arguments import check_number
from ligermodels.convert.shards import is_dtensor, local_box
from ligermodels.errors import InputError, short
from ligermodels.layers.sharding import check_not_freed
from ligermodels.ops.optimizer.adamw import adamw_numbers, adamw_step_in_memory
from ligermodels.ops.optimizer.blockwise import Average
from ligermodels.ops.optimizer.foreach_adamw import AdamWUpdate, foreach_adamw_step
from ligermodels.ops.optimizer.rounding import Shard
from ligermodels.training.blockwise_state import CODES, SCALES, average_of, local_tensor, new_blockwise
from ligermodels.training.recording import GraphNumbers, Recording


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` in one kernel launch for many parameters, with the same states and state dict.

    Sharded parameters (DTensor) are updated shard by shard; make the optimizer after the model is sharded. amsgrad,
    maximize, capturable and differentiable are not implemented, nor are sparse gradients.

    bfloat16 parameters may be rounded stochastically, which is exact on average. Rounding to nearest, as in torch,
    loses every update below half a unit in the last place (1/512 of the weight), and with a high beta2 the second
    moments never decrease. Other dtypes are always rounded to nearest.

    Examples:
        >>> optimizer = FusedAdamW(model.parameters(), lr=1e-5, rounding="stochastic")
        >>> model(input_ids, labels=input_ids).loss.backward()
        >>> optimizer.step()
    """

    # Defaults of the class, because copies of an optimizer take only its state, groups and defaults.
    graph_numbers: GraphNumbers | None = None  # while a CUDA graph of the step is recorded
    backward_norms: dict[int, Tensor] | None = None
    """With `step_in_backward`: index of a parameter -> norm of its last gradient since `zero_grad`."""
    _handles: Sequence[RemovableHandle] = ()
    options_of_all: Sequence[str] = ("rounding", "seed", "state_bits")
    """Options of the optimizer that a parameter group cannot have."""
    traces_backward = False  # while a CUDA graph is prepared: the backward pass frees gradients and updates nothing

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
        state_bits: Literal[8] | None = None,
    ) -> None:
        """
        Args:
            params: parameters, or parameter groups.
            lr: learning rate.
            betas: decay rates of the first and second moments.
            eps: added to the square root of the second moment.
            weight_decay: decoupled weight decay.
            rounding: rounding of bfloat16 parameters and states, and of 8-bit states.
            seed: seed of "stochastic" rounding. The random bits depend on the seed, the step and the index of the
                parameter, so a run is reproducible with any sharding. A state dict does not contain the seed.
            state_bits: 8: the moments of matrices have 8 bits per element, with a scale for every 256 elements of a
                row. Default: None, moments have the dtype of the parameter; those of vectors always do.

        Raises:
            InputError: unknown rounding or number of bits, a number out of range, or no parameter requires a gradient.
        """
        _check_group({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if rounding not in ("nearest", "stochastic"):
            raise InputError(f"rounding: must be 'nearest' or 'stochastic', got {rounding!r}")
        if state_bits not in (None, 8):
            raise InputError(
                f"state_bits: must be 8, or None for states in the dtype of the parameter, got {state_bits}"
            )
        if not isinstance(params, Iterable):
            raise InputError(f"params: must be parameters, or groups of them, got {short(params)}")
        if not isinstance(params, Tensor):  # torch raises an error for a Tensor
            params = list(params) or [{"params": []}]
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        if not any(parameter.requires_grad for group in self.param_groups for parameter in group["params"]):
            raise InputError("no parameter requires a gradient: there is nothing to train")
        self.defaults |= {
            "rounding": rounding,
            "seed": seed,
            "state_bits": state_bits,
        }  # not in the groups: a state dict replaces them

    def __init_subclass__(cls) -> None:
        """Raises TypeError for a subclass with the method of one parameter that earlier versions called."""
        if "update_parameter" in vars(cls):
            raise TypeError(f"{cls.__name__}.update_parameter: is called no more; change update_parameters instead")
        super().__init_subclass__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Raises InputError for an option that is out of range, not implemented, or not one of
        groups."""
        _check_group(param_group)
        for name in self.options_of_all:
            if name in param_group:
                raise InputError(f"{name}: is the same for all groups; give it to {type(self).__name__} instead")
        if not param_group.get("decoupled_weight_decay", True):  # state dicts of Adam have it, and torch ignores it
            raise InputError("decoupled_weight_decay: FusedAdamW does not implement False; use torch.optim.Adam")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict. Raises InputError for anything else, and for an option that is out of range or not
        implemented; also if a hook of `register_load_state_dict_pre_hook` returns it."""
        if not isinstance(state_dict, Mapping):
            raise InputError(f"state_dict: must be a state_dict() of an optimizer, got {short(state_dict)}")
        loaded: list[Mapping[str, Any]] = []

        def check(_: Any, content: Any) -> None:
            self.check_state(content)
            loaded.append(content)

        after_others = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            after_others.remove()
        (content,) = loaded
        groups = content["param_groups"]
        saved = [index for group in groups for index in group["params"]]
        for index, _, parameter in self.indexed_parameters():  # torch casts all states to the dtype of the parameter
            for name, value in content["state"].get(saved[index], {}).items():
                if name.endswith((CODES, SCALES)):
                    self.state[parameter][name] = value.to(parameter.device)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise InputError for a state dict that cannot be loaded."""
        groups = state_dict.get("param_groups")
        if not isinstance(state_dict.get("state"), Mapping) or not isinstance(groups, list | tuple):
            raise InputError(f"state_dict: must be a state_dict() of an optimizer, got {short(state_dict)}")
        for group in groups:
            _check_group(group)

    @torch.compiler.disable(reason="its kernels are compiled; torch.compile would only trace parameter by parameter")
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. `closure` computes the loss again; its result is returned.

        Raises InputError for parameters that FSDP2 had gathered when this optimizer was made."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated: defaultdict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for index, group, parameter in self.indexed_parameters():
            if parameter.grad is not None:
                self.start_state(parameter, index)
                updated[group].append((index, parameter))
            else:
                check_not_freed([parameter])
        for group, parameters in updated.items():
            self.update_parameters(parameters, self.param_groups[group])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets `backward_norms`."""
        super().zero_grad(set_to_none)
        if self.backward_norms:
            self.backward_norms.clear()

    @property
    def steps_in_backward(self) -> bool:
        """Whether hooks of `step_in_backward` are registered."""
        return any(handle.id in (handle.hooks_dict_ref() or ()) for handle in self._handles)

    def step_in_backward(self) -> list[RemovableHandle]:
        """Update each parameter in the backward pass, as soon as its gradient is complete, and free the gradient.

        Call `step` all the same, for schedulers that count steps; it finds no gradient. Under FSDP2 each update follows
        the reduction of the gradient over the ranks. `backward_norms` has the norms of the gradients.

        Do not use it with gradient accumulation over several backward passes, clipping or scaling; `train` and
        `graph_step` refuse them.

        Returns:
            Handles; `handle.remove()` ends it. The hooks are also removed when the optimizer is deleted.
        """
        self.backward_norms = {}
        # A parameter holds its hook: a strong reference to the optimizer would be a cycle that is never collected.
        optimizer = weakref.ref(self)

        def update(parameter: Tensor, index: int, group: int) -> None:
            if (this := optimizer()) is None or parameter.grad is None:  # None if hooks were registered twice
                return
            this.start_state(parameter, index)
            if this.backward_norms is not None:
                this.backward_norms[index] = torch.linalg.vector_norm(parameter.grad.detach())
            if not this.traces_backward:
                this.update_parameters([(index, parameter)], this.param_groups[group])
            parameter.grad = None

        handles = [
            parameter.register_post_accumulate_grad_hook(partial(update, index=index, group=group))
            for index, group, parameter in self.indexed_parameters()
            if parameter.requires_grad
        ]
        self._handles = handles
        for handle in handles:
            weakref.finalize(self, handle.remove)
        return handles

    def indexed_parameters(self) -> Iterator[tuple[int, int, Tensor]]:
        """(index, index of the group, parameter) of every parameter."""
        grouped = ((i, p) for i, group in enumerate(self.param_groups) for p in group["params"])
        return ((index, i, parameter) for index, (i, parameter) in enumerate(grouped))

    # -- what a subclass changes -----------------------------------------------------------------------------------

    @torch.no_grad()
    def start_state(self, parameter: Tensor, index: int) -> None:
        """Create the state of a parameter that has none. Raises InputError for a sparse gradient."""
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise InputError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which "
                f"{type(self).__name__} does not implement; use sparse=False, or torch.optim.SparseAdam for it"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")  # not on torch's default device
            state.update(self.new_state(parameter, index))
        step = state["step"]
        if not isinstance(step, Tensor):  # checkpoints of torch before 1.12, and of other libraries
            step = torch.tensor(float(step), device="cpu")
        state["step"] = step.cpu()  # torch's fused AdamW counts on the GPU; reading it waits

    def new_state(self, parameter: Tensor, index: int) -> dict[str, Tensor]:
        """The state of a parameter before its first step, without the number of steps."""
        return self.new_average("exp_avg", parameter) | self.new_average("exp_avg_sq", parameter)

    def new_average(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        """A running average of zeros in the state of a parameter."""
        if self.defaults["state_bits"] == 8 and parameter.ndim > 1:
            return new_blockwise(name, parameter)
        return {name: torch.zeros_like(parameter, memory_format=torch.contiguous_format)}

    def step_numbers(self, group: dict[str, Any], step: int, index: int) -> tuple[float, float, float]:
        """The numbers of a parameter's update that change from step to step.

        Args:
            group: the options of its group.
            step: number of the step, from 1.
            index: index of the parameter.
        """
        return adamw_numbers(step, float(group["lr"]), group["betas"], group["weight_decay"])

    @torch.no_grad()
    def update_parameters(self, parameters: Sequence[tuple[int, Tensor]], group: dict[str, Any]) -> None:
        """Update parameters of one group, and count their step unless a CUDA graph is recorded.

        Args:
            parameters: index among all parameters, from 0, and the parameter, with its gradient and its state.
            group: the options of the group.
        """
        if self.graph_numbers is not None:
            for index, parameter in parameters:
                numbers, key = self.graph_numbers.of(index)
                adamw_step_in_memory(
                    *self._tensors_of(parameter), numbers=numbers, key=key, betas=group["betas"], eps=group["eps"],
                    shard=None if key is None else shard_of(parameter),
                )  # fmt: skip
            return
        if len({id(parameter) for _, parameter in parameters}) < len(parameters):  # torch warns of such groups
            for each in parameters:
                self.update_parameters([each], group)
            return
        steps = [self.state[parameter]["step"] for _, parameter in parameters]
        seeds = [self.rounding_seeds(index) for index, _ in parameters]
        updates = [
            AdamWUpdate(
                *self._tensors_of(parameter), int(step) + 1, seed, None if seed is None else shard_of(parameter)
            )
            for (_, parameter), step, seed in zip(parameters, steps, seeds, strict=True)
        ]
        options = {name: group[name] for name in ("betas", "eps", "weight_decay")}
        foreach_adamw_step(updates, lr=float(group["lr"]), **options)
        torch._foreach_add_(steps, 1)

    def _tensors_of(self, parameter: Tensor) -> tuple[Tensor, Tensor, Average, Average]:
        """A parameter, its gradient and their averages, as far as this rank has them."""
        state, gradient = self.state[parameter], parameter.grad
        averages = average_of(state, "exp_avg"), average_of(state, "exp_avg_sq")
        return local_tensor(parameter), local_tensor(gradient), *averages

    def rounding_seeds(self, index: int) -> tuple[int, int] | None:
        """Seeds of stochastic rounding. The index gives parameters of the same shape different random bits."""
        return (self.defaults["seed"], index) if self.defaults["rounding"] == "stochastic" else None

    # -- CUDA graphs: see `RecordableOptimizer` ------------------------------------------------------------------------

    def recording_refusal(self) -> str:
        """Why the step cannot be recorded now; "" if it can."""
        return ""

    def recording(self) -> Recording:
        """The numbers of the step, in tensors."""
        return GraphNumbers(self)


def shard_of(parameter: Tensor) -> Shard | None:
    """The position of this rank's shard in a sharded parameter; None for a plain parameter."""
    box = local_box(parameter) if is_dtensor(parameter) else None
    return None if box is None else Shard(parameter.shape, box.starts)


def _check_group(group: Any) -> None:
    if not isinstance(group, Mapping):
        raise InputError(f"param_groups: must be dicts, got {short(group)}")
    for name in ("lr", "eps", "weight_decay"):
        if name in group and not isinstance(group[name], Tensor):
            check_number(name, group[name])
    betas = group.get("betas", (0, 0))
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise InputError(f"betas: must be two numbers, got {short(betas)}")
    if any(not isinstance(beta, Tensor) and check_number("betas", beta) >= 1 for beta in betas):
        raise InputError(f"betas: must be below 1, got {short(betas)}")
    for name in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(name):
            raise InputError(f"{name}: FusedAdamW does not implement it; use torch.optim.AdamW")
