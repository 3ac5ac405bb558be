"""A pass through a causal language model: from its inputs to hidden states, and from these to the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import Tensor

from ligermodels.layers import RouterOutput, Targets, load_balancing_loss
from ligermodels.layers.tokens import TokenLayout, layout_without_padding
from ligermodels.models.inputs import ModelInputs, check_boundaries, check_inputs, prefill_lengths
from ligermodels.models.output import CausalLMOutput

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM


class Decoded(NamedTuple):
    """The result of the decoder.

    hidden: states after the final norm, (rows, length, H) in the `layout`; or (1, n, H) of the tokens with a target.
    layout: layout of the states.
    targets: the targets of the labels, or None.
    aux_loss: load-balancing loss of mixtures of experts, or None.
    hidden_states: the residual streams (B, T, H) of `return_hidden_states`, or None.
    """

    hidden: Tensor
    layout: TokenLayout
    targets: Targets | None
    aux_loss: Tensor | None
    hidden_states: tuple[Tensor, ...] | None


def decode(model: CausalLM, inputs: ModelInputs, every_token: bool, token_weights: Tensor | None = None) -> Decoded:
    """Run the decoder.

    Args:
        model: the model.
        inputs: the tokens, checked here, and everything that belongs to them.
        every_token: whether the states of all tokens are needed, also of those without a target.
        token_weights: (B, T), checked here too, or None.

    Returns:
        The hidden states, and everything that the head's losses need beside them.

    Raises:
        InputError: the inputs do not fit.
    """
    shape = check_inputs(model, inputs, token_weights)
    if inputs.state is None:
        layout = model.layout(
            shape, attention_mask=inputs.attention_mask, position_ids=inputs.position_ids, cu_seqlens=inputs.cu_seqlens
        )
    else:
        layout = layout_without_padding(shape, None)
    needed, targets = inputs.token_indices, None
    if inputs.labels is not None:
        vocab_size = model.config.vocab_size
        needed = targets = Targets(inputs.labels, (1,), vocab_size=vocab_size, layout=layout, every_token=every_token)
    selects = inputs.token_indices is not None  # the caller's tokens: the decoder returns them alone
    router_outputs: list[RouterOutput] = []
    states = None if inputs.return_hidden_states is None else _unfilled(model, inputs.return_hidden_states)
    hidden = model.decoder(
        inputs.input_ids,
        inputs_embeds=inputs.inputs_embeds,
        position_ids=inputs.position_ids,
        cu_seqlens=layout.cu_seqlens if selects else None,
        state=inputs.state,
        seq_lens=prefill_lengths(inputs.attention_mask, inputs.state),
        tree=inputs.tree,
        token_indices=needed,
        router_outputs=router_outputs,
        layout=None if selects else layout,
        hidden_states=states,
    )
    aux_loss = None
    if router_outputs and isinstance(needed, Targets):
        mask = None if layout.packing.mask is None else layout.take(layout.packing.mask, False)
        aux_loss = load_balancing_loss(router_outputs, mask, shard=layout.shard)
    if selects:  # the states (1, n, H) of the tokens that the caller asked for need no restoring
        layout = layout_without_padding(shape, None)
    return Decoded(hidden, layout, targets, aux_loss, None if states is None else _restored(states, inputs, layout))


def _unfilled(model: CausalLM, boundaries: Sequence[int]) -> dict[int, Tensor]:
    """The argument `hidden_states` of `Decoder.forward`."""
    checked = check_boundaries("return_hidden_states", boundaries, len(model.decoder.blocks))
    return cast("dict[int, Tensor]", dict.fromkeys(checked))


def _restored(states: dict[int, Tensor], inputs: ModelInputs, layout: TokenLayout) -> tuple[Tensor, ...]:
    """The `states` by boundary as `CausalLM.forward` returns them: (B, T, H), with zeros on padding."""
    restored = [layout.restore(states[boundary]) for boundary in cast("Sequence[int]", inputs.return_hidden_states)]
    if inputs.state is None or inputs.attention_mask is None:
        return tuple(restored)
    padding = inputs.attention_mask[:, :, None] == 0  # a prefill computes it
    return tuple([x.masked_fill(padding, 0) for x in restored])


def output_of(model: CausalLM, decoded: Decoded, with_logits: bool, with_last_hidden_state: bool) -> CausalLMOutput:
    """The output of a pass, without its loss.

    Args:
        model: the model.
        decoded: the result of `decode`.
        with_logits: return the logits (B, T, V).
        with_last_hidden_state: return the states (B, T, H).

    Returns:
        The output, with zeros on padding.
    """
    output, hidden = CausalLMOutput(aux_loss=decoded.aux_loss, hidden_states=decoded.hidden_states), decoded.hidden
    if decoded.layout.shard is not None and (with_logits or with_last_hidden_state):
        hidden = decoded.layout.shard.restore(hidden)
    if with_last_hidden_state:
        output.last_hidden_state = decoded.layout.packing.restore(hidden)
    if with_logits:
        output.logits = decoded.layout.packing.restore(model.head(hidden))
    return output
