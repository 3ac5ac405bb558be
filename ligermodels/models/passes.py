"""A pass through a causal language model: its mode, from its inputs to hidden states, and from these to the output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from ligermodels.arguments import check_flag
from ligermodels.errors import InputError
from ligermodels.generation import DecodingState
from ligermodels.layers import RouterOutput, Targets, TreeTokens
from ligermodels.layers.tokens import FilledPadding, TokenLayout, Tokens
from ligermodels.models.decoder import Decoder, DecoderConfig
from ligermodels.models.inputs import check_boundaries, check_state, check_tree_and_indices, prefill_lengths
from ligermodels.models.output import CausalLMOutput
from ligermodels.models.routing import RouterResults, check_routing, given_experts, router_results
from ligermodels.ops.runtime.checks import check_id_range, check_plain, check_same_tokens, checked_ids
from ligermodels.ops.runtime.dispatch import batch_invariant_if

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM


Method = TypeVar("Method", bound=Callable[..., Any])


def in_mode_of_model(method: Method) -> Method:
    """Decorator: the method runs under `set_batch_invariant(True)` where the model's `batch_invariant` is True.

    InputError if an option `return_...` is not True or False: another value, such as "no", would count as True.
    """

    @functools.wraps(method)
    def in_mode(model: Any, *args: Any, **options: Any) -> Any:
        for name, value in options.items():
            if value is not None and name.startswith("return_") and name != "return_hidden_states":
                check_flag(name, value)
        if not model.batch_invariant:
            return method(model, *args, **options)
        with batch_invariant_if(True):
            return method(model, *args, **options)

    return cast(Method, in_mode)


class InputModel(Protocol):
    """A model, as far as its inputs have to fit it."""

    config: DecoderConfig
    decoder: Decoder

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class ModelInputs(NamedTuple):
    """The tokens that a model is called with, and everything that belongs to them: see `CausalLM.forward`."""

    input_ids: Tensor | None = None
    inputs_embeds: Tensor | None = None
    labels: Tensor | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    state: DecodingState | None = None
    tree: TreeTokens | None = None
    token_indices: Tensor | Targets | None = None
    return_hidden_states: Sequence[int] | None = None
    routing: Tensor | None = None
    return_routing: bool = False

    @property
    def has_loss(self) -> bool:
        """Whether a loss will be computed from the hidden states."""
        return self.labels is not None or self.targets is not None

    @property
    def targets(self) -> Targets | None:
        """The `Targets` that stand for token indices, or None."""
        return self.token_indices if isinstance(self.token_indices, Targets) else None


class DecoderResult(NamedTuple):
    """The result of the decoder.

    hidden: states after the final norm, (rows, length, H) in the `layout`; or (1, n, H) of the tokens with a target.
    layout: layout of the states, whose `restore` fills padding.
    targets: the targets of the labels, or None.
    routers: results of the routers of mixtures of experts.
    hidden_states: the residual streams (B, T, H) of `return_hidden_states`, or None.
    """

    hidden: Tensor
    layout: TokenLayout
    targets: Targets | None
    routers: RouterResults = RouterResults()
    hidden_states: tuple[Tensor, ...] | None = None


def run_decoder(
    model: CausalLM, inputs: ModelInputs, every_token: bool, token_weights: Tensor | None = None
) -> DecoderResult:
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
    if inputs.state is not None or inputs.tree is not None or inputs.token_indices is not None:
        return _run_without_layout(model, inputs, shape)
    layout = model.layout(shape, inputs.attention_mask, inputs.position_ids, inputs.cu_seqlens)
    targets = None if inputs.labels is None else model._targets(inputs.labels, (1,), layout, every_token=every_token)
    needed = None if targets is None else targets.tokens
    hidden, more = _call_decoder(model, inputs, layout, layout, layout=layout, token_indices=needed)
    return DecoderResult(hidden, layout, targets, **more)


def _call_decoder(
    model: CausalLM, inputs: ModelInputs, rows: TokenLayout, every_token: TokenLayout, **options: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Call the decoder.

    Args:
        model: the model.
        inputs: the tokens, and the results that they ask for.
        rows: layout of the tokens in the blocks.
        every_token: layout that restores the states of all tokens to (B, T, H).
        options: further arguments of `Decoder.forward`.

    Returns:
        The states after the final norm; and further results, as fields of `DecoderResult`.
    """
    options |= {"inputs_embeds": inputs.inputs_embeds, "position_ids": inputs.position_ids}
    if inputs.return_hidden_states is not None or model.decoder.has_routers:
        return _call_with_further_results(model, inputs, rows, every_token, options)
    return model.decoder(inputs.input_ids, **options), {}


def check_inputs(model: InputModel, inputs: ModelInputs, token_weights: Tensor | None) -> tuple[int, int]:
    """Check the tokens that a model is called with.

    Args:
        model: the model, for the sizes, dtype and device that the inputs have to fit.
        inputs: the tokens, and everything that belongs to them.
        token_weights: (B, T), or None.

    Returns:
        (B, T) of the inputs.

    Raises:
        InputError: an argument is of a wrong type, dtype, shape or device, or does not go with another.
    """
    ids, mask = inputs.input_ids, inputs.attention_mask
    if (ids is None) == (inputs.inputs_embeds is None):
        raise InputError("give either input_ids or inputs_embeds, and not both")
    tokens = _checked_embeds(model, inputs.inputs_embeds) if ids is None else checked_ids(ids)
    if tokens.is_meta and model.device.type != "meta":
        name = "inputs_embeds" if ids is None else "input_ids"
        raise InputError(f"{name}: is on the meta device, and the model on {model.device}")
    if inputs.state is not None:
        check_state(model, tokens, inputs)
    else:
        check_same_tokens(tokens, labels=inputs.labels, attention_mask=mask, token_weights=token_weights)
        if ids is not None:
            check_id_range(ids, model.config.vocab_size, mask)
    if inputs.routing is not None or inputs.return_routing:
        check_routing(model.decoder, inputs.routing, inputs.return_routing, tokens)
    return tokens.shape[0], tokens.shape[1]


def _checked_embeds(model: InputModel, tokens: Any) -> Tensor:
    """`inputs_embeds`, of a shape and dtype that fit the model."""
    check_plain("inputs_embeds", tokens)
    if tokens.shape[2:] != (model.config.hidden_size,) or not tokens.is_floating_point() or not tokens.numel():
        raise InputError(
            f"inputs_embeds: must be floating, (batch, tokens, {model.config.hidden_size}) with at least one token; "
            f"got {tokens.dtype} {tuple(tokens.shape)}"
        )
    if tokens.dtype != model.dtype and not torch.is_autocast_enabled(tokens.device.type):
        raise InputError(f"inputs_embeds: are {tokens.dtype}, the model is {model.dtype}; cast one, or use autocast")
    return cast(Tensor, tokens)


# -- modes of a pass ---------------------------------------------------------------------------------------------------


def _run_without_layout(model: CausalLM, inputs: ModelInputs, shape: tuple[int, int]) -> DecoderResult:
    """`run_decoder` with a decoding state, or of the tokens of `token_indices`: the decoder is given no layout, and
    returns the states of tokens (B, T), where only a prefill's padding is to fill, or (1, n) of the `token_indices`."""
    check_tree_and_indices(inputs, shape[0] * shape[1])
    state, mask = inputs.state, inputs.attention_mask
    needed = inputs.token_indices if inputs.targets is None else inputs.targets.tokens
    plain, seq_lens = TokenLayout(shape, Tokens()), None
    rows, every_token = plain, plain
    if state is None:
        rows = model.layout(shape, position_ids=inputs.position_ids, cu_seqlens=inputs.cu_seqlens)
    elif mask is not None:
        seq_lens = prefill_lengths(mask, state)
        rows = every_token = replace(plain, packing=FilledPadding(mask.bool()))
    hidden, more = _call_decoder(
        model,
        inputs,
        rows,
        every_token,
        cu_seqlens=rows.cu_seqlens,
        state=state,
        seq_lens=seq_lens,
        tree=inputs.tree,
        token_indices=needed,
    )
    return DecoderResult(hidden, every_token if inputs.token_indices is None else plain, None, **more)


def _call_with_further_results(
    model: CausalLM, inputs: ModelInputs, rows: TokenLayout, every_token: TokenLayout, options: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """`_call_decoder` of a model with routers, or for `return_hidden_states`."""
    options |= _options_of_results(model, inputs, rows)
    # Without a list the routers' logits are not kept.
    outputs: list[RouterOutput] | None = [] if inputs.has_loss or inputs.return_routing else None
    hidden = model.decoder(inputs.input_ids, router_outputs=outputs, **options)
    return hidden, _further_results(model, inputs, outputs or [], rows, every_token, options)


def _options_of_results(model: CausalLM, inputs: ModelInputs, rows: TokenLayout) -> dict[str, Any]:
    """The arguments `hidden_states` and `routing` of `Decoder.forward`.

    The last boundary is in `hidden_states` where routers must see all tokens: blocks before it are not given fewer
    tokens."""
    num_blocks, boundaries = len(model.decoder.blocks), inputs.return_hidden_states
    checked = [] if boundaries is None else check_boundaries("return_hidden_states", boundaries, num_blocks)
    if model.decoder.expert_routers and (inputs.has_loss or inputs.return_routing or inputs.routing is not None):
        checked = [*checked, num_blocks]
    given = given_experts(model.decoder, inputs.routing, rows, inputs.attention_mask)
    return {"routing": given, "hidden_states": dict.fromkeys(checked) if checked or boundaries is not None else None}


def _further_results(
    model: CausalLM,
    inputs: ModelInputs,
    outputs: list[RouterOutput],
    rows: TokenLayout,
    every_token: TokenLayout,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The results of the routers, by their `outputs` in the layout `rows`; and the residual streams (B, T, H) of
    `return_hidden_states`, with zeros on padding, from the `options` of the decoder."""
    results: dict[str, Any] = {}
    if outputs or inputs.return_routing:
        asked = {"with_losses": inputs.has_loss, "with_routing": inputs.return_routing}
        results["routers"] = router_results(model, outputs, rows, **asked, replayed=inputs.routing is not None)
    if inputs.return_hidden_states is not None:
        states = options["hidden_states"]
        results["hidden_states"] = tuple([every_token.restore(states[each]) for each in inputs.return_hidden_states])
    return results


def output_of(
    model: CausalLM, decoded: DecoderResult, with_logits: bool, with_last_hidden_state: bool
) -> CausalLMOutput:
    """The output of a pass, without its loss.

    Args:
        model: the model.
        decoded: the result of `run_decoder`.
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
