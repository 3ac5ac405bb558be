"""The language model within a multimodal model of transformers. Its layers are native; the towers, and the code that
joins their features to the text, are transformers'."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from ligermodels.integrations.cache_name import NAME, by_name, renamed
from ligermodels.integrations.conditions import NO_CACHE
from ligermodels.integrations.inputs import Inputs, Padding
from ligermodels.layers import Targets

TEXT_INPUTS = frozenset({
    "self", "input_ids", "attention_mask", "position_ids", "past_key_values", "cache", "inputs_embeds", "labels",
    "use_cache", "logits_to_keep", "per_layer_inputs", "args", "kwargs",
})  # fmt: skip
"""Arguments of a multimodal model that its language model takes too."""


def inputs_beside_text(model: nn.Module) -> frozenset[str]:
    """Names of the arguments that the language model of a multimodal model lacks: pixels, sounds, their places."""
    return frozenset(inspect.signature(type(model).forward).parameters) - TEXT_INPUTS


@by_name
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
    """The class's own forward, with further arguments for `backbone_forward`.

    Gemma's models make a mask for each pair of tokens. Where it is only the causal mask with padding, the language
    model gets `padding` beside it, and computes natively.

    Args:
        model: the multimodal model without its head.
        input_ids: long (B, T).
        attention_mask: (B, T), or a mask in another form of transformers.
        position_ids: (B, T), or (3 or 4, B, T) with times, heights and widths of tokens.
        past_key_values: cache of transformers.
        inputs_embeds: (B, T, H), in place of `input_ids`.
        use_cache: keep a cache; unlike in the class's own forward, False by default, whatever the config.
        padding: the padding of `attention_mask`, if it is known.
        token_indices: compute only the states of the tokens that have a target.
        native: False for the class's own forward of the language model in any case.
        kwargs: other arguments of the class.

    Returns:
        The output of the class.
    """
    text = model.config.get_text_config()
    inputs: Inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
    if hasattr(text, "use_bidirectional_attention") and not isinstance(attention_mask, dict):
        both_ways = kwargs.get("token_type_ids") is not None  # Gemma 3: images see all of themselves
        both_ways |= text.use_bidirectional_attention == "vision" and kwargs.get("mm_token_type_ids") is not None
        padding = None if both_ways else padding or Padding(attention_mask, inputs)
    elif token_indices is None:
        padding = None  # the language model reads the mask; towers would get the padding too
    more = {"padding": padding, "token_indices": token_indices, "native": None if native else False}
    kwargs |= {name: value for name, value in more.items() if value is not None}
    options = {"attention_mask": attention_mask, "past_key_values": past_key_values, "use_cache": bool(use_cache)}
    output = type(model).forward(model, **inputs, **renamed(options), **kwargs)
    if use_cache is None and text.use_cache and getattr(output, NAME, NO_CACHE) is None:
        setattr(output, NAME, NO_CACHE)
    return output
