"""Forwards of native layers on the modules of a transformers model.

A module keeps its class, parameters and submodules, and gets a `forward` of its own. It looks its submodules up by name
whenever it runs, and calls them: what has taken a submodule's place (an adapter, a quantised projection) takes part.
The native pass calls layers and attention with a `ForwardContext`; with transformers' arguments they run the forward of
their class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.integrations.gated_delta_net import DeltaView
from ligermodels.integrations.views import DenseMoEView, PerLayerInputView, SharedKVView
from ligermodels.layers import (
    AttentionConfig,
    Block,
    DenseMoEConfig,
    ForwardContext,
    KeysValues,
    MLPConfig,
    SharedKVAttentionConfig,
)
from ligermodels.layers.activation import ACTIVATIONS
from ligermodels.layers.kv_cache import LayerKV
from ligermodels.layers.moe import MoEConfig, mix_experts
from ligermodels.layers.norm import AddRMSNorm, NormConfig, RMSNorm, RMSNormAdd
from ligermodels.layers.qkv import Tables
from ligermodels.layers.rope import pairs_to_halves

PLACES = {"alone": RMSNorm, "before": AddRMSNorm, "after": RMSNormAdd}
"""Where a block has a norm -> the native norm for it."""


@dataclass(frozen=True)
class Native:
    """What a transformers module computes.

    config: of the native layer.
    names: part of the native layer ("attention.q", "mlp.down"; all are in `NAMES` of layers' configs) -> path of the
        submodule that it is.
    ropes, rope_by_length: of a backbone, the rotary embeddings, and whether padding in a row changes what its tokens
        give: by frequencies that follow the row's length, or queries scaled by their positions.
    output: of a backbone or a model, the class of what it returns, where that has fields of its own.
    inputs: of a multimodal model, the arguments that its language model does not take.
    """

    config: Any
    names: Mapping[str, str] = field(default_factory=dict)
    ropes: nn.ModuleList | None = None
    rope_by_length: bool = False
    output: type | None = None
    inputs: frozenset[str] = frozenset()


def set_forward(module: nn.Module, forward: Callable[..., Any], native: Native, *, as_class: bool = False) -> None:
    """Give `module` this forward, a function of the module and its arguments; with `as_class` its signature is that of
    the class's own forward.

    Of a module that an adapter has taken the place of, the module within gets it, and under accelerate's hooks (of a
    `device_map`) what these call. Raises InputError where something else, such as Liger, has set a forward.
    """
    module = within_adapter(module)
    place = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    if place == "forward" and place in module.__dict__:
        raise InputError(f"nativize: something has replaced the forward of a {type(module).__name__}; nativize first")
    module.__dict__["native"] = native
    made = module.__dict__[place] = partial(forward, module)  # unlike a bound method, it can be pickled
    if as_class:
        # Trainer and generate go by its arguments. Annotations may not be pickled.
        arguments = [*inspect.signature(type(module).forward).parameters.values()][1:]
        plain = [each.replace(annotation=inspect.Parameter.empty) for each in arguments]
        cast(Any, made).__signature__ = inspect.Signature(plain)


def within_adapter(module: nn.Module) -> nn.Module:
    """The module whose place adapters of PEFT have taken, or itself."""
    while type(module).__module__.startswith("peft."):
        inner = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
        if inner is None:
            raise InputError(f"nativize: {type(module).__name__} of PEFT is in the way; nativize before get_peft_model")
        module = inner
    return module


def unset_forward(module: nn.Module) -> None:
    """Take back what `set_forward` did, if it did."""
    if module.__dict__.pop("native", None) is None:
        return
    if "_old_forward" in module.__dict__:
        module.__dict__["_old_forward"] = partial(type(module).forward, module)
    else:
        module.__dict__.pop("forward", None)


def native_of(module: nn.Module) -> Native:
    """What `set_forward` was told of the module."""
    native: Native = module.__dict__["native"]
    return native


def part(module: nn.Module, name: str) -> Any:
    """The submodule, or parameter, of `module` that a part of a native layer is."""
    found: Any = attrgetter(native_of(module).names[name])(module)
    return found


def norm_forward(module: Any, x: Tensor, other: Tensor | None = None, *, place: str = "alone") -> Any:
    """The norm of x (..., N), alone, or with the addition before or after it: see `layers.norm`."""
    norm = PLACES[place]
    view = _NormView(norm, module.weight, module.native.config)
    return norm.forward(view, x) if place == "alone" else norm.forward(view, x, other)  # type: ignore


@dataclass
class _NormView:
    """What the forward of a native norm reads: a weight, a config, and for the rest what its class has by default."""

    norm: type[RMSNorm]
    weight: Tensor
    config: NormConfig

    def __getattr__(self, name: str) -> Any:
        return getattr(self.norm, name)


def mlp_forward(module: nn.Module, x: Tensor, context: ForwardContext | None = None) -> Tensor:
    """down(activation(gate(x)) * up(x)), x (..., H), with the multipliers of its config."""
    native = native_of(module)
    config: MLPConfig = native.config
    activation: Callable[..., Tensor] = ACTIVATIONS[config.activation]
    if "mlp.gate_up" in native.names:
        gate, up = part(module, "mlp.gate_up")(x).chunk(2, dim=-1)
    else:
        gate, up = part(module, "mlp.gate")(x), part(module, "mlp.up")(x)
    y: Tensor = part(module, "mlp.down")(activation(gate, up, gate_multiplier=config.gate_multiplier))
    return y if config.down_multiplier == 1 else y * config.down_multiplier


def experts_forward(module: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any) -> Any:
    """x (N, H), experts and their weights (N, top_k) -> (N, H). A rank's share of the experts runs its class's code."""
    native = native_of(module)
    config: MoEConfig = native.config
    names = [native.names[name] for name in ("experts.gate_up", "experts.down")]
    gate_up, down = (attrgetter(name)(module) for name in names)
    plain = all(type(weight) in (Tensor, nn.Parameter) for weight in (gate_up, down))
    if args or not plain or len(gate_up) != config.router.num_experts:
        return type(module).forward(module, x, top_k_index, top_k_weights, *args)
    pairs = "experts.gate_up_pairs" in native.names  # and transposed, as in the layout of this name
    if pairs:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate_up_bias, down_bias = (getattr(module, f"{name}_bias") if config.bias else None for name in names)

    def activation(rows: Tensor) -> Tensor:
        parts = (rows,) if pairs else rows.chunk(2, dim=-1)
        return ACTIVATIONS[config.activation](*parts, **config.activation_options)

    return mix_experts(x, top_k_weights, top_k_index, gate_up, down, activation, (gate_up_bias, down_bias))


def mixer_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """(x, ForwardContext, state) -> (B, T, H), as a native mixer; other arguments are for the class's own forward."""
    if len(args) > 1 and isinstance(args[1], ForwardContext):
        native = native_of(module)
        if isinstance(native.config, SharedKVAttentionConfig):
            return SharedKVView(native.config, partial(part, module))(*args)
        if isinstance(native.config, AttentionConfig):
            return _attend(module, *args)
        return DeltaView(native.config, partial(part, module), packed="delta.qkvz" in native.names)(*args)
    return type(module).forward(module, *args, **kwargs)


def _attend(
    module: nn.Module, x: Tensor, context: ForwardContext, state: LayerKV | None = None
) -> Tensor | tuple[Tensor, KeysValues | None]:
    native = native_of(module)
    config: AttentionConfig = native.config
    shared: KeysValues | None = None
    tables: Tables = (None, None) if config.rope is None else context.rope_tables[config.rope]
    if "attention.qkv" in native.names:
        sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        q, k, v = part(module, "attention.qkv")(x).split(sizes, dim=-1)
    else:
        q, k = (part(module, f"attention.{each}")(x) for each in "qk")
        v = k if config.values is not None and config.values.from_keys else part(module, "attention.v")(x)
    gate = None
    if config.output_gate:
        q, gate = (each.flatten(2) for each in q.unflatten(2, (-1, 2 * config.head_dim)).chunk(2, dim=-1))
    whole = config.qk_norm is not None and config.qk_norm.over == "projection"
    if whole:
        q, k = part(module, "attention.q_norm")(q), part(module, "attention.k_norm")(k)
    q, k, v = (each.unflatten(2, (-1, config.head_dim)) for each in (q, k, v))  # a tensor-parallel shard has fewer
    if config.values is not None and config.values.norm_eps is not None:
        v = ops.rms_norm(v, None, config.values.norm_eps)
    if config.qk_norm is not None and not whole:
        q, k = part(module, "attention.q_norm")(q), part(module, "attention.k_norm")(k)
    if config.stored_as_pairs and config.rope is not None:
        q, k = (pairs_to_halves(each, config.rope.channels) for each in (q, k))
    options: dict[str, Any] = {"softmax_scale": config.softmax_scale, "window": config.window}
    options["softcap"] = config.softcap
    options["sinks"] = attrgetter(native.names["attention.sinks"])(module) if config.sinks else None
    if state is not None and context.cache_seqlens is not None:
        joined = torch.cat([each.unflatten(2, (k.shape[2], -1)) for each in (q, k, v)], dim=3)
        group = q.shape[2] // k.shape[2]
        q = ops.rope_qkv_cached(
            joined.flatten(2).to(state.keys.dtype),
            *tables, k.shape[2], group, config.head_dim, state.keys, state.values, context.cache_seqlens,
        )  # fmt: skip
        q = config.scale_queries(q, context)
        mask = None if context.tree is None else context.tree.mask
        out = ops.decode_attention(q, state.keys, state.values, context.cache_seqlens, tree_mask=mask, **options)
        out = out.to(x.dtype)
    else:
        cos, sin = tables
        if cos is not None and sin is not None:
            q, k = ops.rope(q, k, cos, sin)
        q = config.scale_queries(q, context)
        if state is not None:
            state.fill(k, v)
        out = ops.attention(q, k, v, cu_seqlens=context.cu_seqlens, backend=config.backend, **options)
        shared = KeysValues(k, v)
    out = out.flatten(2)
    y: Tensor = part(module, "attention.o")(out if gate is None else out * gate.sigmoid())
    return (y, shared) if config.shares_kv else y


class _FusedNorm:
    """A norm that also adds, as a native block calls it."""

    fused_add = True

    def __init__(self, norm: nn.Module, place: str) -> None:
        self._norm, self._place = norm, place

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Any:
        return self._norm(x, other, place=self._place)


class _TokenWise:
    """A feed-forward layer of ours, as a native block calls it."""

    token_wise = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: Tensor, context: ForwardContext | None = None) -> Any:
        return self._module(x, context)


class BlockView:
    """A native block whose parts are those of a transformers layer."""

    def __init__(self, layer: nn.Module) -> None:
        native = native_of(layer)
        self._layer, self._names, self._config = layer, native.names, native.config
        self.residual_scale = native.config.residual_scale

    forward, _add = Block.forward, Block._add
    mlp_has_extra_output = False
    mixer_has_extra_output = property(lambda self: self._config.mixer.has_extra_output)
    layer_scalar = property(
        lambda self: self._layer.layer_scalar if native_of(self._layer).config.layer_scalar else None
    )
    mixer = property(lambda self: part(self._layer, "mixer"))
    mixer_norm = property(lambda self: self._norm("mixer_norm", "before"))
    mlp_norm = property(lambda self: self._norm("mlp_norm", "before"))
    mixer_post_norm = property(lambda self: self._norm("mixer_post_norm", "after"))
    mlp_post_norm = property(lambda self: self._norm("mlp_post_norm", "after"))

    @property
    def mlp(self) -> Callable[..., Any]:
        """The feed-forward layer; what is not ours, such as a mixture of experts, takes no context, and may give
        weights of its router beside its result."""
        module = part(self._layer, "mlp")
        dense = _TokenWise(module) if is_ours(module, mlp_forward) else lambda x, context=None: _first(module(x))
        beside = isinstance(self._config.mlp, DenseMoEConfig)
        return DenseMoEView(dense, partial(part, self._layer)) if beside else dense

    @property
    def after(self) -> Callable[..., Tensor] | None:
        """What maps the residual to the residual at the end of the layer."""
        if self._config.after is None:
            return None
        return PerLayerInputView(self._config.after, self._layer, cast(Any, self._norm("after", "after")))

    def _norm(self, name: str, place: str) -> Callable[..., Any] | None:
        """The norm, fused with an addition if it is ours."""
        if f"norm.{name}" not in self._names:
            return _identity if place == "before" else None
        norm = part(self._layer, f"norm.{name}")
        if not is_ours(norm, norm_forward):
            return norm
        return _FusedNorm(norm, place)


def is_ours(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether the module has the forward that `set_forward` gave it; others may have replaced it since."""
    return getattr(module.__dict__.get("forward"), "func", None) is forward


PLACING = ("torch.distributed.", "transformers.", "accelerate.", "deepspeed.")
"""Packages whose hooks move weights and inputs about, and have no interest in their values."""


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether a hook sees what goes through one of `modules`: it expects what transformers' code gives it."""
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


def _identity(x: Tensor) -> Tensor:
    return x


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple) else found


def layer_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """(x, ForwardContext, state), as a native block; else the class's own forward."""
    if len(args) > 1 and isinstance(args[1], ForwardContext):
        return BlockView(module).forward(*args)  # type: ignore[misc]
    return type(module).forward(module, *args, **kwargs)
