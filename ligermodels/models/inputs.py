"""The inputs of `CausalLM.forward`, and their checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from ligermodels.arguments import check_count, is_sequence
from ligermodels.errors import InputError, short
from ligermodels.generation import DecodingState
from ligermodels.layers import Targets, TreeTokens
from ligermodels.layers.packing import check_ids_kind, check_plain, check_same_tokens, check_token_ids
from ligermodels.models.decoder import Decoder, DecoderConfig
from ligermodels.models.routing import check_routing
from ligermodels.ops.runtime.checks import assert_async


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
    ids, embeds = inputs.input_ids, inputs.inputs_embeds
    name, tokens = ("input_ids", ids) if embeds is None else ("inputs_embeds", embeds)
    if tokens is None or (ids is not None and embeds is not None):
        raise InputError("give either input_ids or inputs_embeds, and not both")
    check_plain(name, tokens)
    if tokens.is_meta and model.device.type != "meta":
        raise InputError(f"{name}: is on the meta device, and the model on {model.device}")
    if tokens.ndim < 2:
        raise InputError(f"{name}: must have a dimension of sequences and one of tokens, got {tuple(tokens.shape)}")
    shape = (tokens.shape[0], tokens.shape[1])
    if inputs.state is None:
        _check_tokens(model, name, tokens, inputs, token_weights)
    else:
        _check_state(model, name, tokens, inputs)
    if inputs.tree is not None or inputs.token_indices is not None:
        _check_tree_and_indices(inputs, shape[0] * shape[1])
    if inputs.routing is not None or inputs.return_routing:
        check_routing(model.decoder, inputs.routing, inputs.return_routing, tokens)
    return shape


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


def _check_tree_and_indices(inputs: ModelInputs, count: int) -> None:
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


def _check_tokens(
    model: InputModel, name: str, tokens: Tensor, inputs: ModelInputs, token_weights: Tensor | None
) -> None:
    """Check a pass without a decoding state; `tokens` are the ids or embeddings called `name`."""
    by_token = {"labels": inputs.labels, "attention_mask": inputs.attention_mask, "token_weights": token_weights}
    check_same_tokens(tokens, **by_token)
    if inputs.attention_mask is not None:
        tokens = _without_padding(tokens, inputs.attention_mask)
    if name == "input_ids":
        check_token_ids(tokens, model.config.vocab_size)
    else:
        _check_embeds(model, tokens)


def _check_embeds(model: InputModel, tokens: Tensor) -> None:
    """Check the shape and dtype of `inputs_embeds`."""
    if tokens.shape[2:] != (model.config.hidden_size,) or not tokens.is_floating_point() or not tokens.numel():
        raise InputError(
            f"inputs_embeds: must be floating, (batch, tokens, {model.config.hidden_size}) with at least one token; "
            f"got {tokens.dtype} {tuple(tokens.shape)}"
        )
    if tokens.dtype != model.dtype and not torch.is_autocast_enabled(tokens.device.type):
        raise InputError(f"inputs_embeds: are {tokens.dtype}, the model is {model.dtype}; cast one, or use autocast")


def _without_padding(tokens: Tensor, mask: Tensor) -> Tensor:
    """`tokens` (B, T) with 0 for padding, because padding may hold any id; embeddings as they are."""
    _check_real(mask)
    return tokens.masked_fill(mask == 0, 0) if tokens.ndim == 2 else tokens


def _check_real(mask: Tensor) -> None:
    """Check the dtype of an attention mask."""
    if mask.is_complex():
        raise InputError(f"attention_mask: must be whole numbers or bool, got {mask.dtype}")


def _check_state(model: InputModel, name: str, tokens: Tensor, inputs: ModelInputs) -> None:
    """Check a pass with a decoding state; `tokens` are the ids or embeddings called `name`, whose values are not
    checked."""
    if inputs.cu_seqlens is not None:
        raise InputError("cu_seqlens: a decoding state takes one sequence a row; give no packed documents with it")
    if not isinstance(inputs.state, DecodingState):
        raise InputError(f"state: must be what new_state gives, got a {type(inputs.state).__name__}")
    if inputs.labels is not None:
        raise InputError("labels: a decoding state is for generation; give no labels with it")
    if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
        raise InputError("state: a pass with a decoding state has no gradient; call it under torch.no_grad()")
    if name == "input_ids":
        check_ids_kind(tokens)
    else:
        _check_embeds(model, tokens)
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
    _check_real(attention_mask)
    mask = attention_mask.bool()
    assert_async(mask == attention_mask, "attention_mask: may hold only 1 (a token) and 0 (padding)")
    seq_lens = mask.sum(1)
    assert_async(seq_lens > 0, "attention_mask: a row has no token")
    on_the_left = torch.arange(mask.shape[1], device=mask.device) < seq_lens[:, None]
    assert_async(mask == on_the_left, "attention_mask: a prefill takes padding on the right only")
    return seq_lens
