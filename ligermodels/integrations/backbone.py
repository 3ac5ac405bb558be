"""The forward of a transformers backbone that computes natively, with transformers' arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast

from ligermodels.integrations.cache_name import NAME, by_name, renamed
from ligermodels.integrations.conditions import (
    NoCache,
    check_checkpointing,
    layers_run_natively,
    no_cache,
    reads_features,
    reads_positions,
    runs_natively,
    text_config,
)
from ligermodels.integrations.decoder import AddedFeatures, refuse_batch_invariance, split_positions
from ligermodels.integrations.inputs import (
    Inputs,
    Padding,
    check_document_bounds,
    check_embeddings,
    check_inputs,
    check_positions,
    check_within_vocabulary,
    shape_of,
)
from ligermodels.layers import MoEConfig, Targets
from ligermodels.layers.packing import bounds_of

EXTRAS = ("cu_seq_lens_q", "per_layer_inputs", "visual_pos_masks", "deepstack_visual_embeds")
"""Arguments beside the tokens that the native pass computes with; see `backbone_forward`."""


@by_name
def backbone_forward(
    backbone: Any,
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    token_indices: Targets | None = None,
    padding: Padding | None = None,
    native: bool = True,
    **kwargs: Any,
) -> Any:
    """Compute the states after the final norm.

    The class's own forward runs with a cache, a mask for each pair of tokens, padding between tokens, dropout, hooks in
    the layers, or a request for the attentions or hidden states of all layers: see `integrations.conditions`.

    Args:
        backbone: the backbone.
        input_ids: long (B, T).
        attention_mask: (B, T), 1 on tokens and 0 on padding; or a mask in another form of transformers.
        position_ids: (B, T) or (1, T); or (3 or 4, B, T), times, heights and widths of tokens.
        past_key_values: cache of transformers.
        inputs_embeds: (B, T, H), in place of `input_ids`.
        use_cache: keep a cache.
        token_indices: compute only the states of the tokens that have a target, (1, n, H).
        padding: the padding of `attention_mask`, if it is known.
        native: False for the class's own forward in any case.
        kwargs: other arguments of the class. The native pass computes with `cu_seq_lens_q`, int32 (n + 1,), bounds of
            documents packed into one row (by default documents begin where positions do not rise by 1);
            `per_layer_inputs` (B, T, layers, P), see `Decoder.forward`; and `visual_pos_masks`, bool (B, T), with
            `deepstack_visual_embeds`, for each of the first layers the features (n, H) that are added to its result
            for these n tokens.

    Returns:
        An output of transformers with the states as `last_hidden_state`, (B, T, H), zero on padding.

    Raises:
        InputError: an argument has a wrong type, dtype or shape.
        BackendError: under `ops.set_batch_invariant`.
    """
    refuse_batch_invariance()
    inputs: Inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
    extras = {name: kwargs.pop(name, None) for name in EXTRAS}
    _check(backbone, inputs, attention_mask, past_key_values, extras["cu_seq_lens_q"])
    padding = padding or Padding(attention_mask, inputs)
    options: dict[str, Any] = {"past_key_values": past_key_values, "use_cache": use_cache, **kwargs}
    images = extras["visual_pos_masks"], extras["deepstack_visual_embeds"] or ()
    if (
        native
        and runs_natively(backbone, inputs, padding, options)
        and layers_run_natively(backbone, padding)
        and reads_positions(backbone, position_ids)
        and reads_features(backbone, inputs, extras["per_layer_inputs"], *images)
    ):
        check_checkpointing(backbone)
        hidden = _states(backbone, inputs, padding, extras, token_indices)
        gives_router_logits = has_router_logits(backbone)
        output = backbone.native.output or (MoeModelOutputWithPast if gives_router_logits else BaseModelOutputWithPast)
        return output(last_hidden_state=hidden, **{NAME: no_cache(backbone, use_cache)})
    options |= {name: value for name, value in extras.items() if value is not None}
    result = type(backbone).forward(backbone, **inputs, attention_mask=attention_mask, **renamed(options))
    if native and token_indices is not None:
        result.last_hidden_state = _needed_states(result.last_hidden_state, padding, token_indices)
    return result


def check_tokens(module: Any, inputs: Inputs, attention_mask: Any, past_key_values: Any) -> None:
    """Check the inputs of a backbone or model.

    Args:
        module: the backbone or model.
        inputs: the tokens.
        attention_mask: mask in any form of transformers, or None.
        past_key_values: cache, or None. `runs_natively` refuses a `NoCache`.

    Raises:
        InputError: an argument has a wrong type, dtype or shape.
    """
    cache = None if isinstance(past_key_values, NoCache) else past_key_values
    tokens = inputs["input_ids"], inputs["inputs_embeds"]
    check_inputs(*tokens, attention_mask, cache, text_config(module), module.device)


def has_router_logits(module: Any) -> bool:
    """Whether outputs of the class have a field for router logits, as in families whose config can request them."""
    has_experts = any(isinstance(block.mlp, MoEConfig) for block in module.native.config.blocks)
    return has_experts or hasattr(text_config(module), "output_router_logits")


def _check(backbone: Any, inputs: Inputs, attention_mask: Any, past_key_values: Any, bounds: Any) -> None:
    check_tokens(backbone, inputs, attention_mask, past_key_values)
    input_ids, embeddings = inputs["input_ids"], inputs["inputs_embeds"]
    check_within_vocabulary(input_ids, backbone.embed_tokens)
    if input_ids is not None or embeddings is not None:
        check_embeddings(embeddings, backbone)
        check_positions(inputs["position_ids"], shape_of(inputs), text_config(backbone), backbone.device)
        check_document_bounds(bounds, shape_of(inputs), backbone.device)


def _states(
    backbone: Any, inputs: Inputs, padding: Padding, extras: Mapping[str, Any], token_indices: Targets | None
) -> Tensor:
    """The states of the native pass: (B, T, H), or (1, n, H) of the needed tokens."""
    decoder, layout, positions = backbone.native.layer, padding.layout, inputs["position_ids"]
    if added := _added_features(padding, extras):
        decoder = decoder.with_features(added)
    if positions is not None:  # transformers takes (1, T) for all sequences
        positions = positions.expand(*positions.shape[:-2], shape_of(inputs)[0], -1)
    input_ids, embeddings = inputs["input_ids"], inputs["inputs_embeds"]
    if layout is not None and input_ids is not None:
        embeddings = decoder.embed(input_ids)  # with padding: the scale of noise (NEFTune) depends on the shape
    hidden: Tensor = decoder(
        input_ids,
        inputs_embeds=embeddings,
        position_ids=positions,
        cu_seqlens=_document_bounds(padding, split_positions(positions)[0], extras["cu_seq_lens_q"]),
        token_indices=None if token_indices is None else token_indices.tokens,
        per_layer_inputs=extras["per_layer_inputs"],
        layout=layout,
    )
    return hidden if layout is None or token_indices is not None else layout.restore(hidden)


def _document_bounds(padding: Padding, positions: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """Bounds of packed documents over the B * T tokens, int32, or None: given, or found by the caller's positions."""
    if cu_seqlens is None and padding.mask is None and padding.positions is not None and positions is not None:
        cu_seqlens = bounds_of(positions)
    return None if cu_seqlens is None else cu_seqlens.to(torch.int32)


def _added_features(padding: Padding, extras: Mapping[str, Any]) -> list[AddedFeatures]:
    """The features of images for the first layers, in the layout of the pass."""
    mask, layers = extras["visual_pos_masks"], extras["deepstack_visual_embeds"] or ()
    if mask is not None and padding.layout is not None:
        real = cast(Tensor, padding.mask).bool()[mask]  # an image's tokens may be padding
        layers = [features[real.to(features.device)] for features in layers]
        mask = padding.layout.take(mask)
    return [AddedFeatures(mask, features) for features in layers]


def _needed_states(hidden: Tensor, padding: Padding, targets: Targets) -> Tensor:
    """The states that the native pass would return for `targets`, of states (B, T, H) with padding."""
    hidden = hidden if padding.layout is None else padding.layout.take(hidden)
    return targets.take(hidden)
