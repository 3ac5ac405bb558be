"""Forwards of native layers on the modules of a transformers model.

A module keeps its class, parameters and submodules, and gets a `forward` of its own. Submodules are looked up by name
in every pass and called, so that a module that has replaced a submodule (an adapter, a quantised projection) takes
part. The native pass calls layers and mixers with a `ForwardContext`; with transformers' arguments they run the forward
of their class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.integrations.settings import Settings, is_of_libraries, settings_of
from ligermodels.layers import ForwardContext
from ligermodels.ops.runtime.tensors import under_autocast

FINAL_NORM = "decoder.norm"
"""Name of the final norm in `Native.names` of a backbone."""


@dataclass(frozen=True)
class Native:
    """The native counterpart of a transformers module.

    config: config of the native layer or model; None of a rotary embedding, which keeps its forward.
    names: part of the native layer ("attention.q", "mlp.down": keys of `NAMES` of the layers' configs) -> path of the
        submodule or parameter.
    layer: the native layer that computes; None where the module's forward does.
    rope_by_length: whether padding in a row changes the result for its tokens in a backbone, by frequencies that depend
        on the length of the row or by queries that are scaled by their positions.
    output: class of the output of a backbone or model, where it has fields of its own.
    inputs: arguments of a multimodal model that its language model does not have.
    arguments: of a backbone or model, the arguments that the forward of its class takes without a name, in order.
    settings: settings of the module as the layer has them; see `settings_of`.
    rotary: of a backbone, the names of its rotary embeddings; see `set_rotary`.
    config_settings: of a backbone or model, those of its config; see `config_settings`.
    """

    config: Any
    names: Mapping[str, str] = field(default_factory=dict)
    layer: Any = None
    rope_by_length: bool = False
    output: type | None = None
    inputs: frozenset[str] = frozenset()
    arguments: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    rotary: tuple[str, ...] = ()
    config_settings: Mapping[str, Any] = field(default_factory=dict)


class OnModules(nn.Module):
    """Base class of native layers that compute with the parts of a transformers module.

    A subclass derives from the native layer too, and defines the parts as properties: see `part_named`. It has no
    parameters, and the transformers module is no submodule of it.

    Args:
        source: the transformers module.
        config: config of the native layer.
    """

    source: Any

    def __init__(self, source: nn.Module, config: Any) -> None:
        nn.Module.__init__(self)
        self.__dict__["source"] = source
        self.config = config


def part_named(name: str) -> Any:
    """A property of an `OnModules` layer: the submodule or parameter of its source that `Native.names` calls `name`."""
    return property(lambda self: part(self.source, name))


def attribute_named(name: str) -> Any:
    """A property of an `OnModules` layer: the attribute `name` of its source."""
    return property(lambda self: getattr(self.source, name))


def set_forward(module: nn.Module, forward: Callable[..., Any], native: Native, *, as_class: bool = False) -> None:
    """Replace the forward of a module, or under accelerate's hooks (of a `device_map`) the forward that they call. A
    user's class keeps its own.

    Args:
        module: the module. If a PEFT adapter wraps it, the module within is changed.
        forward: function of the module and its arguments.
        native: the native counterpart.
        as_class: give `forward` the signature of the class's own forward, for a forward of `by_name`.

    Raises:
        InputError: another library, such as Liger, has replaced the forward.
    """
    module = within_adapter(module)
    attribute = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    if attribute == "forward" and attribute in module.__dict__:
        raise InputError(f"nativize: something has replaced the forward of a {type(module).__name__}; nativize first")
    signature = [*inspect.signature(type(module).forward).parameters.values()][1:] if as_class else []
    arguments = tuple(each.name for each in signature if each.kind is each.POSITIONAL_OR_KEYWORD)
    module.__dict__["native"] = replace(native, settings=settings_of(module), arguments=arguments)
    if not is_of_libraries(module):  # a user's class computes something else than the native layer
        forward = type(module).forward
    bound = module.__dict__[attribute] = partial(forward, module)  # unlike a bound method, it can be pickled
    if as_class:
        # Trainer and generate read its arguments. Annotations may not be pickled.
        plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature]
        cast(Any, bound).__signature__ = inspect.Signature(plain)


def within_adapter(module: nn.Module) -> nn.Module:
    """The module that PEFT's adapters wrap, or the module itself."""
    while type(module).__module__.startswith("peft."):
        inner = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
        if inner is None:
            raise InputError(f"nativize: {type(module).__name__} of PEFT is in the way; nativize before get_peft_model")
        module = inner
    return module


def within_checkpoint(layer: nn.Module) -> nn.Module:
    """The layer that torch's activation checkpointing wraps, as accelerate's FSDP2 does, or the layer itself."""
    while (inner := getattr(layer, "_checkpoint_wrapped_module", None)) is not None:
        layer = inner
    return layer


def unset_forward(module: nn.Module) -> None:
    """Undo `set_forward`, if the module has a forward of ours."""
    native = module.__dict__.pop("native", None)
    if native is None or native.config is None:
        return
    if "_old_forward" in module.__dict__:
        module.__dict__["_old_forward"] = partial(type(module).forward, module)
    else:
        module.__dict__.pop("forward", None)


def native_of(module: nn.Module) -> Native:
    """The native counterpart that `set_forward` was given."""
    native: Native = module.__dict__["native"]
    return native


def is_as_composed(module: nn.Module) -> bool:
    """Whether the module still has the settings that its native counterpart was composed from."""
    return native_of(module).settings.changed_in(module) is None


def part(module: nn.Module, name: str) -> Any:
    """The submodule or parameter of `module` that `Native.names` calls `name`."""
    return attrgetter(native_of(module).names[name])(module)


def projected(module: nn.Module, name: str, x: Tensor) -> Tensor:
    """The result of the projection of `module` that `Native.names` calls `name`, under autocast in its dtype: adapters
    of PEFT may return float32 there, and native layers take the results of several projections in one dtype."""
    (y,) = under_autocast(part(module, name)(x))
    return cast(Tensor, y)


def in_one_dtype(norm: Callable[[Tensor, Tensor], Tensor], x: Tensor, z: Tensor) -> Tensor:
    """The result of a gated norm of x with the gate z, computed in the wider of their dtypes and returned in x's: in
    transformers' own forward of a mixer, the result x of a scan may be float32 beside a gate in 16 bits."""
    dtype = torch.promote_types(x.dtype, z.dtype)
    return norm(x.to(dtype), z.to(dtype)).to(x.dtype)


def is_ours(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether the module still has the forward that `set_forward` gave it, and no other library has replaced it."""
    return getattr(module.__dict__.get("forward"), "func", None) is forward


PLACING = ("torch.distributed.", "transformers.", "accelerate.", "deepspeed.")
"""Packages whose hooks move weights and inputs between devices, and do not read their values."""


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether one of `modules` has a hook that reads inputs or outputs: it expects the values of transformers' code."""
    return any(
        not str(getattr(hook, "__module__", None)).startswith(PLACING)
        for module in modules
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        )
        for hook in hooks.values()
    )


ACROSS_TOKENS = "peft.tuners.lily."
"""Package of adapters whose result for a token depends on all tokens of the batch, padding included."""


def mixes_tokens(modules: Iterable[nn.Module]) -> bool:
    """Whether one of `modules` is an adapter that averages over tokens: the native pass leaves some out."""
    return any(type(module).__module__.startswith(ACROSS_TOKENS) for module in modules)


def layer_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a transformers layer or token mixer: called with (x, `ForwardContext`, state) the native `Block` or
    mixer, else the class's own forward."""
    if len(args) > 1 and isinstance(args[1], ForwardContext):
        return native_of(module).layer(*args)
    return type(module).forward(module, *args, **kwargs)


def native_forward(module: nn.Module, *args: Any) -> Any:
    """Forward of a convolution or gated norm within a mixer."""
    return native_of(module).layer(*args) if is_as_composed(module) else type(module).forward(module, *args)


def first_of(output: Any) -> Tensor:
    """The hidden states in the output of a module, which may be a tuple with further results."""
    return cast(Tensor, output[0] if isinstance(output, tuple) else output)
