"""Settings of transformers modules, as their config gives them to the native counterparts. If a user changes one,
before `nativize` or after, the code of the class runs, which reads it in every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import initialization

OF_A_CONFIG = (
    "final_logit_softcapping", "logits_scaling", "output_multiplier", "layer_types", "layers_block_type",
    "sliding_window", "attention_chunk_size", "use_bidirectional_attention", "rope_parameters", "rope_interleave",
    "layer_rope_theta", "mup_enabled",
)  # fmt: skip
"""Fields of a config that transformers reads in every pass, not only where it builds modules."""

IGNORED = frozenset({
    "training", "gradient_checkpointing", "layer_idx", "vocab_size", "padding_idx", "name_or_path", "num_experts",
    "max_seq_len_cached", "original_max_seq_len",
})  # fmt: skip
"""Attributes that do not change the numbers of a pass, or that the native pass reads too."""


LIBRARIES = "transformers", "torch"
"""Packages with the forwards that native layers stand in for. Remote code is in another, "transformers_modules"."""


@dataclass(frozen=True)
class Settings:
    """Settings of a module.

    kind: its class, whose forward reads them.
    attributes: plain attributes by name, such as `scaling`. An entry for something that is no plain attribute, such as
        "forward" or a buffer, marks it as changed.
    children: settings of submodules without tensors (an activation, a dropout) by name.
    """

    kind: type[nn.Module] = nn.Module
    attributes: Mapping[str, Any] = field(default_factory=dict)
    children: Mapping[str, Settings] = field(default_factory=dict)

    def changed_in(self, module: nn.Module) -> str | None:
        """The name of an attribute or submodule of `module` with other settings, "forward" for another forward of its
        class, or None."""
        attributes = vars(module)
        if _class_before_fsdp2(module).forward is not self.kind.forward:
            return "forward"
        for name, value in self.attributes.items():
            if name not in attributes or attributes[name] != value:
                return name
        for name, settings in self.children.items():
            child = module._modules.get(name)
            if child is None or has_own_forward(child) or settings.changed_in(child) is not None:
                return name
        return None


def settings_of(module: nn.Module) -> Settings:
    """The settings of a module. The forward of another library or a user's class counts as changed."""
    attributes = _plain(module)
    if not is_of_libraries(module):
        attributes["forward"] = None
    children = {
        name: settings_of(child)
        for name, child in module.named_children()
        if not any(True for _ in (*child.parameters(), *child.buffers()))
    }
    return Settings(_class_before_fsdp2(module), attributes, children)


def _class_before_fsdp2(module: nn.Module) -> type[nn.Module]:
    """The class of a module, from which FSDP2 derives another one. A layer's class of transformers wraps the forward of
    each class that derives from it."""
    cls = type(module)
    return cls.__bases__[-1] if cls.__module__.startswith("torch.distributed.fsdp.") else cls


def is_of_libraries(module: nn.Module) -> bool:
    """Whether the forward of the module's class is one of LIBRARIES, not of a user's class."""
    return str(type(module).forward.__module__).partition(".")[0] in LIBRARIES


def has_own_forward(module: nn.Module) -> bool:
    """Whether this one module has a forward in place of its class's. Hooks of accelerate do not count."""
    forward = vars(module).get("_old_forward", vars(module).get("forward"))
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def config_settings(config: Any) -> dict[str, Any]:
    """The fields of OF_A_CONFIG in the config of a language model; None where it has no such field."""
    return {name: deepcopy(getattr(config, name, None)) for name in OF_A_CONFIG}


def keep_settings(modules: Iterable[nn.Module]) -> bool:
    """Whether all modules with a native counterpart still have the settings that it was composed from."""
    for module in modules:
        native = vars(module).get("native")
        if native is not None and native.settings.changed_in(module) is not None:
            return False
    return True


def keeps_config(config: Any, settings: Mapping[str, Any]) -> bool:
    """Whether the config of a language model still has these settings, of `config_settings`."""
    return all(getattr(config, name, None) == value for name, value in settings.items())


def changed_setting(model: Any, config: Mapping[str, Any]) -> str | None:
    """The name of an attribute or field with another value than its native counterpart was composed from, or None.

    Args:
        model: the transformers model.
        config: the settings of its config, of `config_settings`.
    """
    if not keeps_config(model.config.get_text_config(), config):
        return "the config"
    for path, module in model.named_modules():
        native = vars(module).get("native")
        if native is None:
            continue
        is_changed_rotary = native.config is None and has_own_forward(module)
        if name := "forward" if is_changed_rotary else native.settings.changed_in(module):
            return f"{path or type(model).__name__}.{name}"
    return None


def as_built(backbone: Any) -> Any:
    """A backbone of the same class as the config alone builds it, without tensors."""
    with torch.device("meta"), initialization.no_init_weights():
        return type(backbone)(deepcopy(backbone.config))


def expect_settings(backbone: Any, built: Any, inner: Callable[[Any], nn.Module]) -> None:
    """Let modules with a native counterpart, which is composed from the config, have the settings that the config
    gives: others have been set before.

    Args:
        backbone: the backbone.
        built: the same as the config builds it, of `as_built`.
        inner: the module that an adapter wraps, or the module itself.
    """
    for module, expected in _pairs(backbone, built, inner):
        if native := vars(module).get("native"):
            vars(module)["native"] = replace(native, settings=settings_of(expected))


def _pairs(module: nn.Module, built: nn.Module, inner: Callable[[Any], nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    yield module, built
    for name, child in built.named_children():
        if (own := module._modules.get(name)) is not None:
            yield from _pairs(inner(own), child, inner)


def set_rotary(backbone: Any, built: Any, native: Callable[..., Any]) -> None:
    """Mark the rotary embeddings of a backbone by a counterpart, `native(settings=...)`: the native pass computes their
    tables itself. They are those children of the backbone, or modules within, that have no parameters.

    Args:
        backbone: the backbone.
        built: the same as the config builds it, of `as_built`.
        native: makes the counterpart.
    """
    names = tuple(name for name, child in built.named_children() if not any(True for _ in child.parameters()))
    for name in names:
        for module, expected in _pairs(backbone.get_submodule(name), built.get_submodule(name), lambda module: module):
            settings, by_length = settings_of(expected), _follows_length(expected)
            buffers = _changed_buffers(module, expected, built._init_weights, by_length)
            attributes = {} if by_length else settings.attributes
            vars(module)["native"] = native(settings=replace(settings, attributes={**attributes, **buffers}))
    vars(backbone)["native"] = replace(vars(backbone)["native"], rotary=names)


def has_rotary_of(backbone: nn.Module, names: Iterable[str]) -> bool:
    """Whether the rotary embeddings of a backbone are those of `set_rotary`, with their settings."""
    rotary = [module for name in names for module in getattr(backbone, name).modules()]
    are_marked = all("native" in vars(module) and not has_own_forward(module) for module in rotary)
    return are_marked and keep_settings(rotary)


def _follows_length(rotary: nn.Module) -> bool:
    """Whether frequencies of a rotary embedding follow the length of a sequence."""
    kinds = getattr(rotary, "rope_type", "")
    return any(
        "dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,))
    )


def _changed_buffers(
    rotary: nn.Module, built: nn.Module, initialise: Callable[[nn.Module], object], by_length: bool
) -> dict[str, None]:
    """Names of buffers (frequencies) of a rotary embedding with other values than the config gives, up to rounding on
    another device or in another dtype. Passes change those that follow the length of a sequence."""
    built.to_empty(device="cpu", recurse=False)
    initialise(built)
    changed: dict[str, None] = {}
    for name, expected in built.named_buffers(recurse=False):
        value = rotary._buffers.get(name)
        if (by_length and "original" not in name) or (value is not None and value.is_meta):
            continue
        dtype = expected.dtype if value is None else value.dtype
        tolerance = max(1e-5, torch.finfo(dtype).eps)
        if (
            value is None
            or value.shape != expected.shape
            or not torch.allclose(value.cpu(), expected.to(dtype), rtol=tolerance, atol=0)
        ):
            changed[name] = None
    return changed


def _plain(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in IGNORED
        and (value is None or isinstance(value, bool | int | float | str | tuple | list | FunctionType))
    }
