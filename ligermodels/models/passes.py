"""A pass through a causal language model: from its inputs to hidden states, and from these to the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor

from ligermodels.layers import RouterOutput, Targets
from ligermodels.layers.router import NOT_ROUTED
from ligermodels.layers.tokens import TokenLayout, layout_without_padding
from ligermodels.models.inputs import ModelInputs, check_boundaries, check_inputs, prefill_lengths
from ligermodels.models.output import CausalLMOutput
from ligermodels.models.routing import RouterResults, given_experts, router_results

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM


class Decoded(NamedTuple):
    """The result of the decoder.

    hidden: states after the final norm, (rows, length, H) in the `layout`; or (1, n, H) of the tokens with a target.
    layout: layout of the states.
    targets: the targets of the labels, or None.
    routers: results of the routers of mixtures of experts.
    hidden_states: the residual streams (B, T, H) of `return_hidden_states`, or None.
    """

    hidden: Tensor
    layout: TokenLayout
    targets: Targets | None
    routers: RouterResults
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
    states = _unfilled(model, inputs)
    if inputs.state is not None or inputs.token_indices is not None:
        return _decode_in_place(model, inputs, shape, states)
    layout = model.layout(
        shape, attention_mask=inputs.attention_mask, position_ids=inputs.position_ids, cu_seqlens=inputs.cu_seqlens
    )
    targets = model._targets(inputs.labels, (1,), layout, every_token=every_token)
    needed = None if targets is None else targets.tokens
    hidden, routers = _hidden(model, inputs, layout, layout=layout, token_indices=needed, hidden_states=states)
    return Decoded(hidden, layout, targets, routers, _restored(states, inputs, layout))


def _hidden(model: CausalLM, inputs: ModelInputs, rows: TokenLayout, **options: Any) -> tuple[Tensor, RouterResults]:
    """Call the decoder with the inputs and `options`: its result, and the results of the routers, in layout `rows`."""
    router_outputs = _router_outputs(inputs)
    if inputs.routing is not None:
        options["routing"] = given_experts(model.decoder, inputs.routing, rows, inputs.attention_mask)
    tokens = {"inputs_embeds": inputs.inputs_embeds, "position_ids": inputs.position_ids}
    hidden = model.decoder(inputs.input_ids, router_outputs=router_outputs, **tokens, **options)
    return hidden, _routers(model, inputs, router_outputs, rows)


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
    hidden, routers = _hidden(
        model,
        inputs,
        rows,
        cu_seqlens=rows.cu_seqlens,
        state=state,
        seq_lens=seq_lens,
        tree=inputs.tree,
        token_indices=needed.tokens if isinstance(needed, Targets) else needed,
        hidden_states=states,
    )
    return Decoded(hidden, layout, None, routers, _restored(states, inputs, layout))


def _has_losses(inputs: ModelInputs) -> bool:
    """Whether a loss will be computed from the hidden states."""
    return inputs.labels is not None or isinstance(inputs.token_indices, Targets)


def _router_outputs(inputs: ModelInputs) -> list[RouterOutput] | None:
    """The argument `router_outputs` of `Decoder.forward`; None, so that no logits are kept, where it is not needed."""
    return [] if _has_losses(inputs) or inputs.return_routing else None


def _routers(
    model: CausalLM, inputs: ModelInputs, outputs: list[RouterOutput] | None, layout: TokenLayout
) -> RouterResults:
    """The results of the routers of a pass in `layout`, with -1 in the routing of padding."""
    if not outputs and not inputs.return_routing:
        return RouterResults()
    results = router_results(
        model,
        outputs or (),
        layout,
        with_losses=_has_losses(inputs),
        with_routing=inputs.return_routing,
        replayed=inputs.routing is not None,
    )
    if results.routing is None or inputs.state is None or inputs.attention_mask is None:
        return results
    padding = inputs.attention_mask[:, :, None, None] == 0  # a prefill computes it
    return results._replace(routing=results.routing.masked_fill(padding, NOT_ROUTED))


def _unfilled(model: CausalLM, inputs: ModelInputs) -> dict[int, Tensor] | None:
    """The argument `hidden_states` of `Decoder.forward`.

    The last boundary is in it where routers must see all tokens: blocks before it are not given fewer tokens."""
    num_blocks, boundaries = len(model.decoder.blocks), inputs.return_hidden_states
    checked = [] if boundaries is None else check_boundaries("return_hidden_states", boundaries, num_blocks)
    if model.decoder.expert_routers and (_has_losses(inputs) or inputs.return_routing or inputs.routing is not None):
        checked = [*checked, num_blocks]
    return cast("dict[int, Tensor]", dict.fromkeys(checked)) if checked or boundaries is not None else None


def _restored(states: dict[int, Tensor] | None, inputs: ModelInputs, layout: TokenLayout) -> tuple[Tensor, ...] | None:
    """The `states` by boundary as `CausalLM.forward` returns them: (B, T, H), with zeros on padding."""
    if states is None or inputs.return_hidden_states is None:
        return None
    restored = [layout.restore(states[boundary]) for boundary in inputs.return_hidden_states]
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
    output = CausalLMOutput(hidden_states=decoded.hidden_states, **decoded.routers._asdict())
    if with_logits or with_last_hidden_state:
        shard, packing = decoded.layout.shard, decoded.layout.packing
        hidden = decoded.hidden if shard is None else shard.restore(decoded.hidden)
        output.last_hidden_state = packing.restore(hidden) if with_last_hidden_state else None
        output.logits = packing.restore(model.head(hidden)) if with_logits else None
    return output
