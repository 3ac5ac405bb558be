"""Initial values of models: every module fills its own parameters and buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ligermodels.convert.shards import fill_shard, is_dtensor
from ligermodels.errors import ConfigError
from ligermodels.layers.sharding import check_not_partitioned


class skip_init(TorchFunctionMode):
    """Context manager that disables `torch.nn.init`, for models on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def owned_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of the parameters and buffers of `module` itself, without its submodules."""
    for named in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in named.items() if tensor is not None)


def persistent_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter or persistent buffer of `module`: the tensors of checkpoints. Shared tensors appear once.

    Parameters that FSDP2 gathered for a forward pass without a backward pass are sharded again. InputError if DeepSpeed
    has partitioned a parameter.
    """
    # Before the parameters are listed: FSDP2's hooks on `state_dict` free what it has gathered.
    persistent = module.state_dict(keep_vars=True).keys()
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    for name, parameter in tensors.items():
        check_not_partitioned(name, parameter)
    return tensors | {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def initialize(module: nn.Module, std: float, name: str = "") -> None:
    """Fill the parameters and buffers of a module with initial values, submodules first.

    Modules with tensors of their own have `init_weights(std)` (all modules of `layers`) or `reset_parameters()`
    (torch's modules). torch's linear layers and embeddings get weights from normal(0, std), and zero for biases and the
    row of a `padding_idx`, as in transformers. Tensors on the meta device are skipped.

    Args:
        module: the module.
        std: standard deviation of the weights.
        name: name of the module, for the message.

    Raises:
        ConfigError: a module has tensors, but neither method.
    """
    for child_name, child in module.named_children():
        initialize(child, std, f"{name}.{child_name}" if name else child_name)
    owned = dict(owned_tensors(module))
    if owned and not any(tensor.is_meta for tensor in owned.values()):
        initialize_own(module, std, name)


_TORCHS_OWN = (nn.Linear.reset_parameters, nn.Embedding.reset_parameters)


@contextmanager
def whole_parameters(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Context manager that replaces sharded parameters of `module` itself by whole, uninitialised tensors.

    At the end each rank keeps its shard of the values, so random values do not depend on the sharding. `names` are the
    parameters.
    """
    shards = {name: p for name in names if (p := module._parameters[name]) is not None and is_dtensor(p)}
    for name, p in shards.items():
        whole = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        module._parameters[name] = nn.Parameter(whole, requires_grad=p.requires_grad)
    yield
    for name, p in shards.items():
        fill_shard(p, module._parameters[name].detach())  # type: ignore[union-attr]
        module._parameters[name] = p


@torch.no_grad()
def initialize_own(module: nn.Module, std: float, name: str) -> None:
    """Fill the tensors of a module itself, without its submodules: see `initialize`.

    Args:
        module: the module.
        std: standard deviation of the weights.
        name: name of the module, for the message.
    """
    for key, parameter in module.named_parameters(recurse=False):
        check_not_partitioned(f"{name}.{key}", parameter)
    own = module._parameters.keys() - set(getattr(module, "tied_parameters", ()))
    with whole_parameters(module, own):
        _initialize_own(module, std, name)


def _initialize_own(module: nn.Module, std: float, name: str) -> None:
    init_weights, reset = getattr(module, "init_weights", None), getattr(module, "reset_parameters", None)
    if callable(init_weights):
        init_weights(std)
    elif isinstance(module, nn.Linear | nn.Embedding) and type(module).reset_parameters in _TORCHS_OWN:
        nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Embedding):
            module._fill_padding_idx_with_zero()
        elif module.bias is not None:
            nn.init.zeros_(module.bias)
    elif callable(reset):
        reset()
    else:
        raise ConfigError(
            f"{name or 'the model'} ({type(module).__name__}) owns {', '.join(dict(owned_tensors(module)))} and has no "
            "way to fill them: give it init_weights(std) or reset_parameters()"
        )


def allocate(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Allocate memory for a model on the meta device.

    Floating tensors of checkpoints get `dtype`, or a wider dtype if their module requires it (`FullPrecision`). Other
    tensors keep their dtype. `initialize_buffers` fills the buffers that checkpoints do not contain.

    Args:
        module: the model, changed in place.
        dtype: dtype of the floating tensors of checkpoints.
        device: device of all tensors.
    """
    stored = {id(tensor) for tensor in persistent_tensors(module).values()}

    def empty(tensor: Tensor) -> Tensor:
        cast = id(tensor) in stored and tensor.is_floating_point()
        return torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype, device=device)

    module._apply(empty)


def fill_meta_buffers(module: nn.Module, std: float) -> None:
    """Allocate and fill the buffers that `load_state_dict(assign=True)` leaves on the meta device.

    These are the buffers with `persistent=False`, which state dicts lack. They go to the device of the first parameter;
    other tensors keep their values. `std` is the standard deviation of weights.
    """
    device = next(module.parameters()).device
    for name, owner in module.named_modules():
        missing = [key for key, buffer in owner.named_buffers(recurse=False) if buffer.is_meta]
        missing = [key for key in missing if key in owner._non_persistent_buffers_set]
        others = [tensor for key, tensor in owned_tensors(owner) if key not in missing]
        if device.type == "meta" or not missing or any(tensor.is_meta for tensor in others):
            continue
        values = [tensor.detach().clone() for tensor in others]
        for key in missing:
            owner._buffers[key] = torch.empty_like(owner._buffers[key], device=device)
        initialize_own(owner, std, name)
        with torch.no_grad():
            for tensor, value in zip(others, values, strict=True):
                tensor.copy_(value)


def initialize_buffers(module: nn.Module, std: float) -> None:
    """Fill modules that own buffers with `persistent=False`, because checkpoints do not contain these buffers."""
    for name, owner in module.named_modules():
        has_buffers = any(owner._buffers[key] is not None for key in owner._non_persistent_buffers_set)
        if has_buffers and not any(tensor.is_meta for _, tensor in owned_tensors(owner)):
            initialize_own(owner, std, name)
