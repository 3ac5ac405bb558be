"""Inputs of a native forward of a transformers model: checks, where transformers has no clear error, and padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ligermodels.arguments import check_count, check_number
from ligermodels.errors import InputError, arguments_named
from ligermodels.layers import IGNORE_INDEX
from ligermodels.layers.packing import check_bounds
from ligermodels.layers.tokens import TokenLayout, Unpadding
from ligermodels.ops.runtime.checks import assert_async, check_plain, check_token_ids
from ligermodels.ops.runtime.dispatch import checked_on_host


def check_inputs(
    input_ids: Any, inputs_embeds: Any, attention_mask: Any, past_key_values: Any, config: Any, device: torch.device
) -> None:
    """Check the inputs of a backbone or model. Each may be None.

    Args:
        input_ids: int32 or int64 (B, T).
        inputs_embeds: floating (B, T, H).
        attention_mask: a tensor (B, T), with a cache (B, any length); a tensor that broadcasts to (B, heads, T, keys);
            a BlockMask; or a dict with masks for the layer types of `config`.
        past_key_values: a cache of transformers.
        config: config of the language model.
        device: device of the model.

    Raises:
        InputError: an argument has a wrong type, dtype or shape, has no token, or is on the meta device and the model
            is not.
    """
    tokens, name, dims = input_ids, "input_ids", "(B, T)"
    if tokens is None:
        tokens, name, dims = inputs_embeds, "inputs_embeds", f"(B, T, {config.hidden_size})"
    if tokens is None:
        return
    _check_tensor(name, tokens, dims, device)
    dtypes = "int32 or int64" if name == "input_ids" else "floating"
    right = tokens.dtype in (torch.int32, torch.int64) if name == "input_ids" else tokens.is_floating_point()
    last = () if name == "input_ids" else (config.hidden_size,)
    if not right or tokens.dim() != 2 + len(last) or tuple(tokens.shape[2:]) != last:
        raise InputError(f"{name}: must be {dtypes}, of shape {dims}; got {tokens.dtype} {tuple(tokens.shape)}")
    if not tokens.numel():
        raise InputError(f"{name}: has no token, {tuple(tokens.shape)}; give at least one sequence of one token")
    if past_key_values is not None and not callable(getattr(past_key_values, "get_seq_length", None)):
        raise InputError(f"past_key_values: must be a cache of transformers, got {type(past_key_values).__name__}")
    if attention_mask is not None:
        shape = (tokens.shape[0], tokens.shape[1])
        _check_mask(attention_mask, shape, past_key_values is not None, config, device)


def _check_tensor(name: str, value: Any, dims: str, device: torch.device) -> None:
    """InputError unless `value` is a dense tensor; on the meta device only with a model on the meta device."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: must be a tensor {dims}, got {type(value).__name__}")
    check_plain(name, value)
    if value.is_meta and device.type != "meta":
        raise InputError(f"{name}: is on the meta device, and the model on {device}")


def _check_mask(mask: Any, shape: tuple[int, int], has_cache: bool, config: Any, device: torch.device) -> None:
    if isinstance(mask, BlockMask):
        return
    if isinstance(mask, Mapping):
        kinds = sorted(set(getattr(config, "layer_types", None) or ()))
        if not any(kind in mask for kind in kinds):
            known = (
                f"has a mask for none of the layer types {', '.join(kinds)}" if kinds else "of this model is no dict"
            )
            raise InputError(f"attention_mask: {known}; give a tensor {shape}")
        return
    _check_tensor("attention_mask", mask, str(shape), device)
    # A cache may be of fixed size, and a mask for each pair of tokens has its keys.
    found, (rows, length) = tuple(mask.shape), shape
    fits = len(found) in (2, 4) and (has_cache or found[-1] == length)
    fits = fits and (found[0] == rows if len(found) == 2 else found[0] in (1, rows) and found[2] in (1, length))
    if not fits or mask.is_complex():
        raise InputError(
            f"attention_mask: must be {shape} as the inputs, or (B, 1, T, T) for each pair of their tokens; got "
            f"{mask.dtype} {found}"
        )


def check_within_vocabulary(input_ids: Tensor | None, embedding: Any) -> None:
    """Raises InputError, where it can without a sync, unless ids (B, T) are rows of the embedding, or of the one within
    an adapter of PEFT."""
    size = getattr(getattr(embedding, "base_layer", embedding), "num_embeddings", None)
    if input_ids is not None and size is not None and not torch.compiler.is_compiling() and checked_on_host(input_ids):
        check_token_ids(input_ids, size)


def check_embeddings(inputs_embeds: Tensor | None, module: torch.nn.Module) -> None:
    """Raises InputError for embeddings of a dtype that no parameter of `module` has, where nothing casts them."""
    if inputs_embeds is None or torch.is_autocast_enabled(inputs_embeds.device.type):
        return
    found: dict[torch.dtype, None] = {}
    for parameter in module.parameters():
        if inputs_embeds.dtype == parameter.dtype:
            return
        found[parameter.dtype] = None
    if all(dtype.is_floating_point for dtype in found):  # others are quantised, and compute in a dtype of their own
        raise InputError(
            f"inputs_embeds: are {inputs_embeds.dtype}, the model is {' and '.join(map(str, found))}; cast one, or use "
            "autocast"
        )


def check_positions(position_ids: Any, shape: tuple[int, int], config: Any, device: torch.device) -> None:
    """Check positions.

    Args:
        position_ids: None, or real numbers (B, T) or (1, T); if the rotary embeddings of `config` have sections, also
            (axes, B, T).
        shape: (B, T) of the inputs.
        config: config of the language model.
        device: device of the model.

    Raises:
        InputError: another type, dtype or shape.
    """
    if position_ids is None:
        return
    _check_tensor("position_ids", position_ids, str(shape), device)
    found = tuple(position_ids.shape)
    has_axes = "mrope_section" in repr(getattr(config, "rope_parameters", None))
    fits = len(found) in (2, 3 if has_axes else 2) and found[-1] == shape[1] and found[-2] in (1, shape[0])
    if not fits or position_ids.is_complex() or position_ids.dtype == torch.bool:
        raise InputError(f"position_ids: must be numbers of shape {shape}; got {position_ids.dtype} {found}")


def check_document_bounds(cu_seq_lens: Any, shape: tuple[int, int], device: torch.device) -> None:
    """Check the bounds of packed documents.

    Args:
        cu_seq_lens: None, or int32 or int64 (n + 1,), rising from 0 to B * T.
        shape: (B, T) of the inputs.
        device: device of the model.

    Raises:
        InputError: another type, dtype, shape or values.
    """
    if cu_seq_lens is None:
        return
    name, dims = "cu_seq_lens_q", "(documents + 1,)"
    _check_tensor(name, cu_seq_lens, dims, device)
    if cu_seq_lens.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{name}: must be int32 or int64, of shape {dims}; got {cu_seq_lens.dtype}")
    with arguments_named(cu_seqlens=name):
        check_bounds(cu_seq_lens.to(torch.int32), (1, shape[0] * shape[1]))


def check_loss_inputs(
    labels: Any, tokens: int, vocab_size: int, device: torch.device, options: Mapping[str, Any]
) -> None:
    """Check the labels and options of a loss.

    Args:
        labels: int64, one element for each token, within the vocabulary (on a GPU the values are not checked).
        tokens: number of tokens that have logits.
        vocab_size: number of tokens in the vocabulary.
        device: device of the model.
        options: options of the loss: `shift_labels`, in place of `labels`; `ignore_index`; and `num_items_in_batch`,
            one number.

    Raises:
        InputError: an argument has a wrong type, dtype, shape or value.
    """
    shift_labels = options.get("shift_labels")
    name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    dims = "of int64, an element for each token"
    _check_tensor(name, given, dims, device)
    if given.dtype != torch.int64 or not given.ndim or given.numel() != tokens:
        raise InputError(f"{name}: must be a tensor {dims}, {tokens}; got {given.dtype} {tuple(given.shape)}")
    items = options.get("num_items_in_batch")
    if isinstance(items, Tensor) and items.numel() != 1:
        raise InputError(f"num_items_in_batch: must be one number, got a tensor of shape {tuple(items.shape)}")
    if items is not None and not isinstance(items, Tensor):
        check_number("num_items_in_batch", items)
    if torch.compiler.is_compiling() or not checked_on_host(given):
        return
    ignored = options.get("ignore_index", IGNORE_INDEX)
    used: Tensor = given[..., 1:] if shift_labels is None else given  # as the loss shifts them
    if not bool(((used == ignored) | ((used >= 0) & (used < vocab_size))).all()):
        raise InputError(f"{name}: must lie in [0, {vocab_size}), or be {ignored} to be ignored")


def check_logits_to_keep(logits_to_keep: Any, length: int) -> int:
    """The number of logits of a sequence of `length` tokens that are computed; InputError unless `logits_to_keep` is
    such a number, 0 for all, or the indices of these tokens."""
    if not isinstance(logits_to_keep, Tensor):
        return min(check_count("logits_to_keep", logits_to_keep, least=0) or length, length)
    check_plain("logits_to_keep", logits_to_keep, torch.int64, torch.int32, torch.bool)
    if logits_to_keep.dtype == torch.bool:
        return int(logits_to_keep.sum())
    inside = (logits_to_keep >= -length) & (logits_to_keep < length)
    if logits_to_keep.ndim != 1:
        raise InputError(f"logits_to_keep: must be indices (n,), got shape {tuple(logits_to_keep.shape)}")
    assert_async(inside, f"logits_to_keep: must be indices of the {length} tokens of a sequence")
    return logits_to_keep.numel()


Inputs = dict[str, Any]
"""input_ids, inputs_embeds and position_ids of a batch, each a tensor or None."""


def shape_of(inputs: Inputs) -> tuple[int, int]:
    """(B, T)."""
    tokens: Tensor = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
    return tokens.shape[0], tokens.shape[1]


class Padding:
    """The padding of a batch, by its attention mask. Only masks (B, T) are read; this waits for the GPU once.

    Args:
        attention_mask: mask in any form of transformers, or None.
        inputs: the tokens.
        labels: (B, T), or None.

    Attributes:
        mask: the mask, or None.
        positions: the positions of the inputs, or None.
        at_ends: whether the mask is None or (B, T), and no row has padding between tokens. transformers counts such
            padding for positions and windows.
        exists: whether there is padding.
        is_labelled: whether a label lies on padding, or is predicted from padding: the label of the first token after
            padding on the left. transformers counts these labels, by states that depend on its attention backend.

    Raises:
        InputError: a mask (B, T) has other values than 0 and 1.
    """

    def __init__(self, attention_mask: Any, inputs: Inputs, labels: Tensor | None = None) -> None:
        self.mask: Tensor | None = attention_mask
        self._layout: TokenLayout | None = None
        self.positions: Tensor | None = inputs["position_ids"]
        self.at_ends, self.exists, self.is_labelled = attention_mask is None, False, False
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != shape_of(inputs):
            return
        real = attention_mask != 0
        starts = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
        labelled = real.new_zeros(())
        if isinstance(labels, Tensor) and labels.shape == real.shape:
            counts = labels != IGNORE_INDEX
            labelled = (counts & ~real).any() | (counts[:, 1:] & ~real[:, :-1]).any()
        is_mask = (~real | (attention_mask == 1)).all()
        answers = torch.stack([(starts <= 1).all(), ~real.all(), labelled, is_mask])
        self.at_ends, self.exists, self.is_labelled, is_mask = answers.tolist()
        if not is_mask:
            raise InputError("attention_mask: may hold only 1 (a token) and 0 (padding)")

    @property
    def layout(self) -> TokenLayout | None:
        """The layout of the tokens without padding; None if there is no padding. Making it, at the first call, waits
        for the GPU."""
        if self._layout is None and self.exists and self.mask is not None:
            unpadding = Unpadding(self.mask)
            shape = self.mask.shape[0], self.mask.shape[1]
            self._layout = TokenLayout(shape, unpadding, None, unpadding.cu_seqlens)
        return self._layout
