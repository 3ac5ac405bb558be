"""The language model within a multimodal model of transformers: towers and what joins their features to the text are
transformers', the layers that read the text are native."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from ligermodels.integrations.conditions import NO_CACHE
from ligermodels.integrations.padding import Inputs, Padding
from ligermodels.layers import Targets

TEXT_INPUTS = frozenset({
    "self", "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache",
    "logits_to_keep", "per_layer_inputs", "args", "kwargs",
})  # fmt: skip
"""Arguments of a multimodal model that its language model takes too."""


def inputs_beside_text(model: nn.Module) -> frozenset[str]:
    """Names of the further arguments of such a model: pixels, sounds, and what says where they belong."""
    return frozenset(inspect.signature(type(model).forward).parameters) - TEXT_INPUTS


def multimodal_forward(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    padding: Padding | None = None,
    token_indices: Targets | None = None,
    native: bool = True,
    **kwargs: Any,
) -> Any:
    """As the class's own forward, and arguments of `backbone_forward`. It keeps a cache if `use_cache` says so, not by
    the config.

    Gemma's models make a mask for each pair of tokens; where that says no more than `attention_mask`, the language
    model is told so, and computes natively.
    """
    text = model.config.get_text_config()
    inputs: Inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
    if hasattr(text, "use_bidirectional_attention") and not isinstance(attention_mask, dict):
        both_ways = kwargs.get("token_type_ids") is not None  # Gemma 3: images see all of themselves
        both_ways |= text.use_bidirectional_attention == "vision" and kwargs.get("mm_token_type_ids") is not None
        padding = None if both_ways else padding or Padding(attention_mask, inputs)
    elif token_indices is None:
        padding = None  # the language model gets the mask, and towers get what it gets beside that
    more = {"padding": padding, "token_indices": token_indices, "native": None if native else False}
    kwargs |= {name: value for name, value in more.items() if value is not None}
    options = {"attention_mask": attention_mask, "past_key_values": past_key_values, "use_cache": bool(use_cache)}
    found = type(model).forward(model, **inputs, **options, **kwargs)
    if use_cache is None and text.use_cache and hasattr(found, "past_key_values"):
        found.past_key_values = NO_CACHE if found.past_key_values is None else found.past_key_values
    return found
