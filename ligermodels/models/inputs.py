"""Checks of the inputs of `CausalLM.forward` that only some passes have, such as a decoding state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ligermodels.arguments import check_count, is_sequence
from ligermodels.errors import InputError, short
from ligermodels.generation import DecodingState
from ligermodels.ops.runtime.checks import assert_async, check_not_complex, check_plain, check_same_tokens

if TYPE_CHECKING:
    from ligermodels.models.passes import InputModel, ModelInputs


def check_boundaries(name: str, boundaries: Any, num_blocks: int) -> list[int]:
    """`boundaries` between blocks as ints.

    Args:
        name: name of the argument, for the message.
        boundaries: the value to check.
        num_blocks: number of blocks of the model.

    Raises:
        InputError: it is no sequence of whole numbers from 0, the embeddings, to `num_blocks`, the states before the
            final norm.
    """
    if not is_sequence(boundaries):
        raise InputError(f"{name}: must be a list of numbers of blocks, such as [2, 16], got {short(boundaries)}")
    return [check_count(name, boundary, least=0, most=num_blocks) for boundary in boundaries]


def check_tree_and_indices(inputs: ModelInputs, count: int) -> None:
    """Check the `tree` and the `token_indices` of a pass over `count` tokens."""
    if inputs.tree is not None and inputs.state is None:
        raise InputError("tree: is for decoding, and needs a state")
    if inputs.token_indices is None:
        return
    if inputs.labels is not None:
        raise InputError("token_indices: with labels, the tokens with a target are taken; give one of the two")
    if inputs.attention_mask is not None and inputs.state is None:
        raise InputError("attention_mask: give no token_indices with it")
    if inputs.targets is None:
        check_token_indices(cast(Tensor, inputs.token_indices), count)


def check_state(model: InputModel, tokens: Tensor, inputs: ModelInputs) -> None:
    """Check a pass with a decoding state; `tokens` are the ids or embeddings, whose values are not checked.

    Args:
        model: the model.
        tokens: ids (B, T), or embeddings (B, T, H).
        inputs: the other arguments of the pass.
    """
    if inputs.cu_seqlens is not None:
        raise InputError("cu_seqlens: a decoding state takes one sequence a row; give no packed documents with it")
    if not isinstance(inputs.state, DecodingState):
        raise InputError(f"state: must be what new_state gives, got a {type(inputs.state).__name__}")
    if inputs.labels is not None:
        raise InputError("labels: a decoding state is for generation; give no labels with it")
    if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        raise InputError("state: a pass with a decoding state has no gradient; call it under torch.no_grad()")
    check_same_tokens(tokens, attention_mask=inputs.attention_mask, position_ids=inputs.position_ids)
    if inputs.position_ids is not None:
        check_plain("position_ids", inputs.position_ids, torch.int64, torch.int32)


def requested_returns(labels: Tensor | None, **returns: bool) -> dict[str, bool]:
    """The options of a head's loss for the results that are requested.

    Args:
        labels: the labels or targets.
        returns: whether each result is requested, by its argument's name.

    Raises:
        InputError: a result is requested, and there are no labels or targets.
    """
    requested = {name: True for name, value in returns.items() if value}
    if requested and labels is None:
        raise InputError(f"{next(iter(requested))}: is of a loss, which needs labels")
    return requested


def check_token_indices(token_indices: Tensor, count: int) -> None:
    """Raises InputError unless they are indices of `count` flattened tokens."""
    check_plain("token_indices", token_indices, torch.int64, torch.int32)
    if token_indices.ndim != 1:
        raise InputError(f"token_indices: must be of one dimension, got shape {tuple(token_indices.shape)}")
    inside = (token_indices >= 0) & (token_indices < count)
    assert_async(inside, f"token_indices: must lie in [0, {count}), the flattened tokens")


def prefill_lengths(attention_mask: Tensor, state: DecodingState) -> Tensor:
    """Number of tokens of each sequence in a prefill, long (B,)."""
    if state.cache_seqlens is not None:
        raise InputError("attention_mask: is for the prefill; a decoding pass takes tokens without padding")
    check_not_complex(attention_mask)
    mask = attention_mask.bool()
    assert_async(mask == attention_mask, "attention_mask: may hold only 1 (a token) and 0 (padding)")
    seq_lens = mask.sum(1)
    assert_async(seq_lens > 0, "attention_mask: a row has no token")
    on_the_left = torch.arange(mask.shape[1], device=mask.device) < seq_lens[:, None]
    assert_async(mask == on_the_left, "attention_mask: a prefill takes padding on the right only")
    return seq_lens
