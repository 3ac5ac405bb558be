"""Whether a pass of a transformers model runs natively, or by the class's own forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ligermodels.archs.unread import DROPOUT
from ligermodels.errors import InputError
from ligermodels.integrations.inputs import Inputs, Padding
from ligermodels.integrations.modules import (
    FINAL_NORM,
    has_hooks,
    is_ours,
    layer_forward,
    mixes_tokens,
    part,
    within_checkpoint,
)
from ligermodels.integrations.settings import has_rotary_of, keep_settings, keeps_config

SWITCHES = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Arguments, or fields of the config, that request results that the native pass does not keep."""

UNUSED = frozenset({
    "cu_seq_lens_k", "max_length_q", "max_length_k", "cache_position", "num_items_in_batch", "seq_idx",
    "labels", "logits_to_keep",
})  # fmt: skip
"""Further arguments that do not change the native pass. Multimodal models pass on the last two."""


class NoCache:
    """Takes the place of the cache that transformers, by its config, would have returned: its use is an error."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"past_key_values.{name}: this pass kept no cache; ask for it by use_cache=True")


NO_CACHE = NoCache()


def no_cache(module: Any, use_cache: bool | None) -> NoCache | None:
    """The `past_key_values` of an output of the native pass: `NO_CACHE` where transformers would return a cache."""
    return NO_CACHE if use_cache is None and getattr(text_config(module), "use_cache", False) else None


def text_config(module: Any) -> Any:
    """The config of the language model in the config of a transformers model."""
    return module.config.get_text_config()


def runs_natively(module: Any, inputs: Inputs, padding: Padding, options: Mapping[str, Any]) -> bool:
    """Whether the native pass computes everything that the arguments and the config ask for.

    Args:
        module: a backbone or a model.
        inputs: the tokens.
        padding: their padding.
        options: the other arguments by name.

    Raises:
        InputError: `past_key_values` come from a native pass, and it kept no cache.
    """
    config, rest = text_config(module), dict(options)
    if isinstance(rest.get("past_key_values"), NoCache):
        raise InputError("past_key_values: the pass that gave these kept no cache; ask for it by use_cache=True")
    return (
        not _requests_more(config, rest)
        and rest.pop("return_dict", None) in (None, True)
        and not rest.pop("use_cache", None)
        and all(value is None or name in UNUSED for name, value in rest.items())
        and (inputs["input_ids"] is None) != (inputs["inputs_embeds"] is None)
        and padding.at_ends
        and keeps_config(config, module.native.config_settings)
        and not (module.training and any(getattr(config, name, None) for name in DROPOUT))
    )


def _requests_more(config: Any, options: dict[str, Any]) -> bool:
    """Whether SWITCHES in `options`, or else in the config, are on; removes them from `options`."""
    switches = [(name, options.pop(name, None)) for name in SWITCHES]
    return any(getattr(config, name, False) if value is None else value for name, value in switches)


def layers_run_natively(backbone: Any, padding: Padding) -> bool:
    """Whether the layers of a backbone compute natively: adapters and hooks on layers may expect transformers'
    arguments, and padding may change frequencies."""
    layers = [*map(within_checkpoint, backbone.layers)]
    modules = [module for root in (backbone.layers, part(backbone, FINAL_NORM)) for module in root.modules()]
    return (
        all(is_ours(x, layer_forward) and is_ours(part(x, "mixer"), layer_forward) for x in layers)
        and not has_hooks(modules)
        and keep_settings((backbone, *modules))
        and has_rotary_of(backbone, backbone.native.rotary)
        and not mixes_tokens(modules)
        and not (padding.exists and backbone.native.rope_by_length)
    )


def reads_positions(backbone: Any, position_ids: Tensor | None) -> bool:
    """Whether the native pass computes with such positions.

    Between whole numbers transformers interpolates; natively, documents would begin there. Times, heights and widths of
    tokens, (3 or 4, B, T), need a model with a single rotary embedding that has sections for them.
    """
    if position_ids is None:
        return True
    if position_ids.ndim < 3:
        return not position_ids.is_floating_point()
    settings = getattr(backbone.config, "rope_parameters", None) or {}
    return "mrope_section" in settings and len(backbone.native.layer.ropes) == 1


def reads_features(
    backbone: Any, inputs: Inputs, per_layer_inputs: Tensor | None, mask: Tensor | None, features: Sequence[Tensor]
) -> bool:
    """Whether the native pass computes with inputs of each layer and with features of images.

    Args:
        backbone: the backbone.
        inputs: the tokens.
        per_layer_inputs: (B, T, layers, P), or None. Beside embeddings, a model that has such inputs needs them.
        mask: tokens that get the features, bool (B, T), or None.
        features: features that are added to the results of the first layers. The last layer may compute only the needed
            tokens, and cannot have any.
    """
    has_per_layer = backbone.native.config.per_layer_inputs is not None
    if (per_layer_inputs is None) != (inputs["input_ids"] is not None or not has_per_layer):
        return False
    return not features or (mask is not None and len(features) < len(backbone.layers))


def check_checkpointing(backbone: Any) -> None:
    """InputError where gradient checkpointing would lose gradients: with `use_reentrant=True` torch computes only the
    gradients of a layer's arguments, and keys and values that layers share are in the context."""
    config = backbone.native.config
    shares = config.per_layer_inputs or any(block.mixer.state_from for block in config.blocks)
    if not backbone.training or not shares:
        return
    for layer in backbone.layers:
        of_torch, own = (getattr(layer, name, None) for name in ("checkpoint_fn", "_gradient_checkpointing_func"))
        functions = (of_torch, own if getattr(layer, "gradient_checkpointing", False) else None)
        if any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions):
            raise InputError(
                "gradient_checkpointing_kwargs: use_reentrant=True loses gradients of what layers of this model share; "
                "give use_reentrant=False"
            )
