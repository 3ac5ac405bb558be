"""Settings of transformers modules that their native counterparts were composed from: if one changes later, the code of
the class runs, which reads it in every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

OF_A_CONFIG = (
    "final_logit_softcapping", "logits_scaling", "output_multiplier", "layer_types", "layers_block_type",
    "sliding_window", "attention_chunk_size", "use_bidirectional_attention", "rope_parameters", "rope_interleave",
    "layer_rope_theta", "mup_enabled",
)  # fmt: skip
"""Fields of a config that transformers reads in every pass, not only where it builds modules."""

EPS = ("variance_epsilon", "eps")
"""Names of a norm's epsilon in transformers."""

IGNORED = frozenset({"training", "gradient_checkpointing", "layer_idx", "vocab_size", "padding_idx", "name_or_path"})
"""Attributes that do not change the numbers of a pass, or that the native pass reads too."""


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The settings of a module, by name: its plain attributes, such as `scaling`; and of each submodule without tensors
    (an activation, a dropout) its class and plain attributes."""
    settings = _plain(module)
    for name, child in module.named_children():
        if not any(True for _ in (*child.parameters(), *child.buffers())):
            settings[name] = (type(child), _plain(child))
    return settings


def config_settings(config: Any) -> dict[str, Any]:
    """The fields of OF_A_CONFIG in the config of a language model; None where it has no such field."""
    return {name: deepcopy(getattr(config, name, None)) for name in OF_A_CONFIG}


def has_settings(module: nn.Module, settings: Mapping[str, Any]) -> bool:
    """Whether a module still has these settings, of `settings_of`."""
    attributes, children = vars(module), module._modules
    for name, value in settings.items():
        if not isinstance(value, tuple):
            if name not in attributes or attributes[name] != value:
                return False
            continue
        kind, plain = value
        child = children.get(name)
        if child is None or type(child) is not kind or not has_settings(child, plain):
            return False
    return True


def keep_settings(modules: Iterable[nn.Module]) -> bool:
    """Whether all modules with a native counterpart still have the settings that it was composed from."""
    for module in modules:
        native = vars(module).get("native")
        if native is not None and not has_settings(module, native.settings):
            return False
    return True


def keeps_config(config: Any, settings: Mapping[str, Any]) -> bool:
    """Whether the config of a language model still has these settings, of `config_settings`."""
    return all(getattr(config, name, None) == value for name, value in settings.items())


def changed_setting(model: Any, config: Mapping[str, Any]) -> str | None:
    """The name of a module or field with other settings than its native counterpart was composed from, or None.

    Args:
        model: the transformers model.
        config: the settings of its config, of `config_settings`.
    """
    if not keeps_config(model.config.get_text_config(), config):
        return "the config"
    return next((name for name, module in model.named_modules() if not keep_settings((module,))), None)


def set_rotary(backbone: nn.Module, native: Callable[..., Any]) -> None:
    """Mark the rotary embeddings of a backbone by a counterpart, `native(settings=...)`: the native pass computes their
    tables itself."""
    for rotary in _rotary(backbone):
        vars(rotary)["native"] = native(settings=_scaling(rotary))


def has_rotary_of(backbone: nn.Module) -> bool:
    """Whether the rotary embeddings of a backbone are those of `set_rotary`, with their settings."""
    rotary = _rotary(backbone)
    return all("native" in vars(module) for module in rotary) and keep_settings(rotary)


def _rotary(backbone: nn.Module) -> list[nn.Module]:
    return [child for child in backbone.children() if type(child).__name__.endswith("RotaryEmbedding")]


def _scaling(rotary: nn.Module) -> dict[str, Any]:
    """The factors of cosine and sine, unless they follow the length of a sequence."""
    kinds = getattr(rotary, "rope_type", "")
    by_length = any(
        "dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,))
    )
    return {} if by_length else {n: v for n, v in _plain(rotary).items() if n.endswith("attention_scaling")}


def _plain(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in IGNORED
        and (value is None or isinstance(value, bool | int | float | str))
    }
