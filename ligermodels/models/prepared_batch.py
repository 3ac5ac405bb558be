"""A batch for losses that are computed from hidden states, outside of `CausalLM.forward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers import Targets
from ligermodels.layers.tokens import TokenLayout
from ligermodels.models.causal_lm import CausalLM
from ligermodels.ops.runtime.checks import check_plain, check_same_tokens


class PreparedBatch(NamedTuple):
    """A checked batch, laid out in rows without padding.

    inputs: arguments of the model, with which it returns hidden states.
    targets: the shifted labels of each loss, or None without labels.
    layout: how the tokens (B, T) lie in the rows.
    """

    inputs: dict[str, Any]
    targets: Targets | None
    layout: TokenLayout


def prepare_batch(
    model: CausalLM,
    ahead: Sequence[int],
    *,
    input_ids: Tensor | None = None,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    token_weights: Tensor | None = None,
    every_token: bool = False,
) -> PreparedBatch:
    """Check a batch, lay its tokens out in rows without padding, and shift its labels for each loss.

    Args:
        model: computes the hidden states.
        ahead: for each loss, how many tokens its labels lie ahead; 1 for the next token.
        input_ids: (B, T) long.
        labels: (B, T) long, aligned with the inputs; -100 is ignored. None for no loss.
        attention_mask: (B, T), 1 on tokens and 0 on padding.
        position_ids: (B, T) long. Positions that do not rise by 1 mark packed documents.
        cu_seqlens: int32 (n + 1,), bounds of documents packed into a single row.
        inputs_embeds: (B, T, H) in place of `input_ids`.
        token_weights: (B, T), checked only.
        every_token: compute the hidden states of all tokens, also of tokens without a target.

    Returns:
        The batch.

    Raises:
        InputError: an argument is of a wrong type, dtype or shape, or does not go with another.
    """
    name, tokens = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    if tokens is None:
        raise InputError("give either input_ids or inputs_embeds, and not both")
    check_plain(name, tokens)
    check_same_tokens(tokens, labels=labels, attention_mask=attention_mask, token_weights=token_weights)
    layout = model.layout(
        (tokens.shape[0], tokens.shape[1]),
        attention_mask=attention_mask,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        sharded=False,  # the model divides the rows over ranks, and returns the states of all tokens
    )
    targets = None if labels is None else model._targets(labels, ahead, layout, every_token=every_token)
    by_token = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
    inputs: dict[str, Any] = {key: None if x is None else layout.packing.take(x) for key, x in by_token.items()}
    needed = None if every_token else targets
    inputs |= {"cu_seqlens": layout.cu_seqlens, "token_indices": needed, "return_last_hidden_state": True}
    return PreparedBatch(inputs, targets, layout)
