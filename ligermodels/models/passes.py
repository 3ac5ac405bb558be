"""A pass through a causal language model: from its inputs to hidden states, and from these to the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
    states = None if inputs.return_hidden_states is None else _unfilled(model, inputs.return_hidden_states)
    if inputs.state is not None or inputs.token_indices is not None:
        return _decode_in_place(model, inputs, shape, states)
    layout = model.layout(
        shape, attention_mask=inputs.attention_mask, position_ids=inputs.position_ids, cu_seqlens=inputs.cu_seqlens
    )
    targets = model._targets(inputs.labels, (1,), layout, every_token=every_token)
    needed = None if targets is None else targets.tokens
    hidden, router_outputs = _hidden(model, inputs, layout=layout, token_indices=needed, hidden_states=states)
    aux_loss = _aux_loss(router_outputs, layout) if router_outputs and targets is not None else None
    return Decoded(hidden, layout, targets, aux_loss, None if states is None else _restored(states, inputs, layout))


def _hidden(model: CausalLM, inputs: ModelInputs, **options: Any) -> tuple[Tensor, list[RouterOutput]]:
    """Call the decoder with the inputs and `options`: its result, and the outputs of routers."""
    router_outputs: list[RouterOutput] = []
    tokens = {"inputs_embeds": inputs.inputs_embeds, "position_ids": inputs.position_ids}
    return model.decoder(inputs.input_ids, router_outputs=router_outputs, **tokens, **options), router_outputs


def _decode_in_place(
    model: CausalLM, inputs: ModelInputs, shape: tuple[int, int], states: dict[int, Tensor] | None
) -> Decoded:
    """`decode` with a decoding state, or of the tokens of `token_indices`: the decoder is given no layout, and returns
    the states of tokens (B, T), or (1, n) of the `token_indices`, which need no restoring."""
    state, needed = inputs.state, inputs.token_indices
    layout, seq_lens = layout_without_padding(shape, None), None
    if state is None:
        rows = model.layout(shape, position_ids=inputs.position_ids, cu_seqlens=inputs.cu_seqlens)
    else:
        rows, seq_lens = layout, prefill_lengths(inputs.attention_mask, state)
    hidden, router_outputs = _hidden(
        model,
        inputs,
        cu_seqlens=rows.cu_seqlens,
        state=state,
        seq_lens=seq_lens,
        tree=inputs.tree,
        token_indices=needed.tokens if isinstance(needed, Targets) else needed,
        hidden_states=states,
    )
    aux_loss = _aux_loss(router_outputs, rows) if router_outputs and isinstance(needed, Targets) else None
    return Decoded(hidden, layout, None, aux_loss, None if states is None else _restored(states, inputs, layout))


def _aux_loss(router_outputs: list[RouterOutput], layout: TokenLayout) -> Tensor:
    """The load-balancing loss over all tokens but padding."""
    mask = None if layout.packing.mask is None else layout.take(layout.packing.mask, False)
    return load_balancing_loss(router_outputs, mask, shard=layout.shard)


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
    output = CausalLMOutput(aux_loss=decoded.aux_loss, hidden_states=decoded.hidden_states)
    if with_logits or with_last_hidden_state:
        shard, packing = decoded.layout.shard, decoded.layout.packing
        hidden = decoded.hidden if shard is None else shard.restore(decoded.hidden)
        output.last_hidden_state = packing.restore(hidden) if with_last_hidden_state else None
        output.logits = packing.restore(model.head(hidden)) if with_logits else None
    return output
