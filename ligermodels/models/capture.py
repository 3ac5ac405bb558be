"""Capture: the hidden states of a model that draft heads read.

The residual stream s_L after L blocks has the number L, its boundary: s_0 are the scaled embeddings, as they enter the
first block, and s_N the states after all N blocks, before the final norm. transformers' `hidden_states[L]` is s_L for
L < N; its last entry is the norm of s_N.

Checkpoints of draft heads name these states by one of two numbers:

- boundary L: vLLM and speculators (`eagle_aux_hidden_state_layer_ids`, `aux_hidden_state_layer_ids`).
- layer id l, counted from 0, for the output of that layer, s_{l + 1}; -1 for the embeddings: SGLang and SpecForge
  (`eagle_config.eagle_aux_hidden_state_layer_ids`), DeepSpec and DFlash (`target_layer_ids`).

`boundaries_of` and `layer_ids_of` convert one into the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.errors import InputError, short
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.inputs import check_boundaries
from ligermodels.models.native import check_native


class Captured(NamedTuple):
    """The hidden states of a batch, in the model's dtype, with zeros on padding.

    states: (B, T, K * H), the residual streams of K boundaries, concatenated in ascending order of the boundaries.
    last: (B, T, H), after the final norm: the input of the language-model head, `model.logits(last)`. It is the norm of
        s_N; for s_N itself capture the boundary N.
    """

    states: Tensor
    last: Tensor


@torch.no_grad()
def capture(
    model: CausalLM,
    input_ids: Tensor,
    boundaries: Sequence[int],
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Captured:
    """Run a model without gradients, and return the residual streams between its blocks.

    No logits are computed, and only the requested states are kept. The model may compute in float8, and may be
    distributed over ranks; each rank gets the states of its own batch. The model's mode is not changed.

    Args:
        model: the model.
        input_ids: (B, T) long.
        boundaries: different numbers of blocks, each from 0 to N, the number of blocks: 0 for the scaled embeddings, N
            for the states before the final norm. See `default_boundaries`.
        attention_mask: (B, T), 1 on tokens and 0 on padding, on either side.
        position_ids: (B, T) long. Positions that do not rise by 1 mark documents packed into a row.
        cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1).

    Returns:
        The states.

    Raises:
        InputError: there are no boundaries; one of them is no whole number from 0 to N, or is there twice; the other
            arguments do not fit the model, see `CausalLM.forward`; or `model` is no native model.

    Examples:
        >>> model = lm.from_config({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4})
        >>> states, last = lm.capture(model, torch.arange(10)[None], [1, 2, 3])
        >>> states.shape, last.shape
        (torch.Size([1, 10, 192]), torch.Size([1, 10, 64]))
    """
    check_native(model, "capture")
    checked = check_boundaries("boundaries", boundaries, len(model.decoder.blocks))
    if not checked or len(set(checked)) < len(checked):
        raise InputError(f"boundaries: must be at least one, and all different, got {short(boundaries)}")
    output = model(
        input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        return_hidden_states=sorted(checked),
        return_last_hidden_state=True,
    )
    states = torch.cat(cast("tuple[Tensor, ...]", output.hidden_states), dim=-1)
    return Captured(states, cast(Tensor, output.last_hidden_state))


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """The boundaries that EAGLE-3 heads read by default, as in vLLM and speculators: 2, N // 2 and N - 3.

    With fewer than 7 layers these are not three different, ascending numbers: then the last three boundaries before
    s_N, N - 3, N - 2 and N - 1; with fewer than 3 layers all N + 1 boundaries.

    Args:
        num_layers: N, number of layers of the model.
    """
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return tuple(range(num_layers - 3, num_layers)) if num_layers >= 3 else tuple(range(num_layers + 1))


def boundaries_of(layer_ids: Iterable[int]) -> tuple[int, ...]:
    """The boundaries after the layers of these ids: id l -> l + 1, and -1, the embeddings, -> 0."""
    return tuple(layer_id + 1 for layer_id in layer_ids)


def layer_ids_of(boundaries: Iterable[int]) -> tuple[int, ...]:
    """The ids of the layers before these boundaries: L -> L - 1, and 0, the embeddings, -> -1."""
    return tuple(boundary - 1 for boundary in boundaries)
