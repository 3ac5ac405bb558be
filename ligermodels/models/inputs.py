"""Checks of what `CausalLM.forward` is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.generation import DecodingState
from ligermodels.layers.packing import assert_async, check_plain, check_same_tokens, check_token_ids
from ligermodels.models.decoder import DecoderConfig


class InputModel(Protocol):
    """What inputs have to fit."""

    config: DecoderConfig

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


def check_inputs(
    model: InputModel,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    labels: Tensor | None,
    attention_mask: Tensor | None,
    state: DecodingState | None,
    loss_options: Mapping[str, Any],
) -> tuple[int, int]:
    """(B, T) of the inputs; InputError when they, or what comes with them, are not usable."""
    inputs = input_ids if inputs_embeds is None else inputs_embeds
    if inputs is None or (inputs_embeds is not None and input_ids is not None):
        raise InputError("give either input_ids or inputs_embeds, and not both")
    name = "input_ids" if inputs_embeds is None else "inputs_embeds"
    check_plain(name, inputs)
    if inputs.is_meta and model.device.type != "meta":
        raise InputError(f"{name}: is on the meta device, and the model on {model.device}")
    if state is not None:
        if labels is not None:
            raise InputError("labels: a decoding state is for generation; give no labels with it")
        if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
            raise InputError("state: a pass with a decoding state has no gradient; call it under torch.no_grad()")
        return inputs.shape[0], inputs.shape[1]
    token_weights = loss_options.get("token_weights")
    check_same_tokens(inputs, labels=labels, attention_mask=attention_mask, token_weights=token_weights)
    if attention_mask is not None and attention_mask.is_complex():
        raise InputError(f"attention_mask: must be whole numbers or bool, got {attention_mask.dtype}")
    if inputs_embeds is None:
        # Padding may hold any id, even one that the embedding does not have.
        ids = inputs if attention_mask is None else inputs.masked_fill(attention_mask == 0, 0)
        check_token_ids(ids, model.config.vocab_size)
    elif inputs.shape[2:] != (model.config.hidden_size,) or not inputs.is_floating_point() or not inputs.numel():
        raise InputError(
            f"inputs_embeds: must be floating, (batch, tokens, {model.config.hidden_size}) with at least one token; "
            f"got {inputs.dtype} {tuple(inputs.shape)}"
        )
    elif inputs.dtype != model.dtype and not torch.is_autocast_enabled(inputs.device.type):
        raise InputError(f"inputs_embeds: are {inputs.dtype}, the model is {model.dtype}; cast one, or use autocast")
    return inputs.shape[0], inputs.shape[1]


def check_token_indices(token_indices: Tensor, count: int) -> None:
    """Raises InputError unless they are indices of `count` flattened tokens."""
    check_plain("token_indices", token_indices, torch.int64, torch.int32)
    inside = (token_indices >= 0) & (token_indices < count)
    assert_async(inside, f"token_indices: must lie in [0, {count}), the flattened tokens")


def prefill_lengths(attention_mask: Tensor | None, state: DecodingState | None) -> Tensor | None:
    """The tokens of each sequence in a prefill, long (B,)."""
    if attention_mask is None or state is None:
        return None
    if state.cache_seqlens is not None:
        raise InputError("attention_mask: is for the prefill; a decoding pass takes tokens without padding")
    seq_lens = attention_mask.long().sum(1)
    assert_async(seq_lens > 0, "attention_mask: a row has no token")
    on_the_left = torch.arange(attention_mask.shape[1], device=seq_lens.device) < seq_lens[:, None]
    assert_async(attention_mask.bool() == on_the_left, "attention_mask: a prefill takes padding on the right only")
    return seq_lens
