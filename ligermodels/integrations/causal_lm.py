"""Forwards of a transformers causal language model and its head that compute natively, with transformers' arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from ligermodels.integrations.backbone import check_tokens, has_router_logits
from ligermodels.integrations.cache_name import NAME, by_name, renamed
from ligermodels.integrations.conditions import layers_run_natively, no_cache, runs_natively, text_config
from ligermodels.integrations.inputs import Inputs, Padding, check_logits_to_keep, check_loss_inputs, shape_of
from ligermodels.integrations.modules import has_hooks, is_ours, part
from ligermodels.integrations.token_statistics import token_statistics
from ligermodels.layers import IGNORE_INDEX, HeadConfig, Targets
from ligermodels.layers.lm_head import loss_or_log_probs
from ligermodels.layers.tokens import TokenLayout, Tokens


@by_name
def causal_lm_forward(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> Any:
    """The forward of the class, on the native backbone.

    Args:
        model: the model.
        input_ids: long (B, T).
        attention_mask: (B, T), or a mask in another form of transformers.
        position_ids: (B, T) or (1, T).
        past_key_values: cache of transformers.
        inputs_embeds: (B, T, H), in place of `input_ids`.
        labels: long (B, T), -100 where ignored. In training their loss is computed without logits.
        use_cache: keep a cache.
        logits_to_keep: compute the logits of this number of last tokens, or of these indices; 0 for all tokens.
        kwargs: other arguments of the class.

    Returns:
        An output of transformers; `logits` are None where the loss is computed without them.

    Raises:
        InputError: an argument has a wrong type, dtype or shape.
    """
    inputs: Inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
    check_tokens(model, inputs, attention_mask, past_key_values)
    options: dict[str, Any] = {"past_key_values": past_key_values, "use_cache": use_cache, **kwargs}
    if input_ids is not None or inputs_embeds is not None:
        rows, length = shape_of(inputs)
        kept = check_logits_to_keep(logits_to_keep, length)
        if labels is not None and model.loss_function is ForCausalLMLoss:
            check_loss_inputs(labels, rows * kept, text_config(model).vocab_size, model.device, kwargs)
    if labels is not None:
        padding = Padding(attention_mask, inputs, labels)
        if padding.is_labelled:
            options["native"] = False
        elif _loss_is_fused(model, inputs, padding, labels, logits_to_keep, options):
            plain = MoeCausalLMOutputWithPast if has_router_logits(model) else CausalLMOutputWithPast
            loss, output = _loss(model, inputs, padding, labels, options), model.native.output or plain
            return output(loss=loss, **{NAME: no_cache(model, use_cache)})
        if model.training and model.loss_function is ForCausalLMLoss and takes_loss_options(model.__class__):
            options["num_items_in_batch"] = _num_items(labels, **kwargs)
    options |= {"labels": labels, "logits_to_keep": logits_to_keep}
    return type(model).forward(model, **inputs, attention_mask=attention_mask, **renamed(options))


def head_forward(
    head: Any, hidden: Tensor, targets: Tensor | None = None, config: HeadConfig | None = None, **options: Any
) -> Any:
    """The forward of the language-model head.

    Args:
        head: the head, an nn.Linear.
        hidden: (..., H).
        targets: long (...), -100 where ignored, or None.
        config: config of the native head; by default the one of `nativize`.
        options: options of the loss; or with `outputs` the options of `token_statistics`, for TRL.

    Returns:
        Logits (..., V), before scale and softcap; with `targets` their loss, with scale and softcap.
    """
    if targets is None:
        return type(head).forward(head, hidden)
    compute = token_statistics if "outputs" in options else loss_or_log_probs
    return compute(config or head.native.config, hidden, head.weight, targets, head.bias, **options)


@cache
def takes_loss_options(kind: Any) -> bool:
    """Whether the forward of a class of transformers passes its further arguments on to the loss."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind.forward).parameters.values())


def _num_items(
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The divisor of transformers' loss: given, or the number of targets; 1 without a target, for a loss of 0."""
    count = ((labels[..., 1:] if shift_labels is None else shift_labels) != ignore_index).sum()
    items = count if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=count.device)
    return torch.where(count > 0, items, 1)


def _loss_is_fused(
    model: Any, inputs: Inputs, padding: Padding, labels: Any, logits_to_keep: int | Tensor, options: Mapping[str, Any]
) -> bool:
    """Whether the loss is computed without logits: in training, if the loss and the head are the usual ones, the
    logits are not requested, and no hook reads them."""
    if getattr(labels, "shape", None) != shape_of(inputs):
        return False
    if isinstance(logits_to_keep, Tensor) or logits_to_keep or not is_ours(model.lm_head, head_forward):
        return False
    if not model.training or has_hooks((part(model, "backbone"), part(model, "inner"), *model.lm_head.modules())):
        return False
    known = {name: value for name, value in options.items() if name not in {"cu_seq_lens_q", *model.native.inputs}}
    return model.loss_function is ForCausalLMLoss and runs_natively(model, inputs, padding, known)


def _loss(model: Any, inputs: Inputs, padding: Padding, labels: Tensor, options: dict[str, Any]) -> Tensor:
    """The loss without logits."""
    num_items = options.pop("num_items_in_batch", None)
    # The class computes the features of pixels: it may pass its arguments on to its towers, and these refuse ours.
    has_pixels = any(options.get(name) is not None for name in model.native.inputs)
    natively = layers_run_natively(part(model, "backbone"), padding)
    every_token = has_pixels or not natively
    layout = None if every_token else padding.layout
    if layout is None:
        # transformers lets the last token of a packed document predict the first label of the next document.
        layout = TokenLayout(shape_of(inputs), Tokens())
    vocab_size = text_config(model).vocab_size
    narrow = not every_token and part(model, "backbone").native.layer.narrows
    targets = Targets(labels, (1,), vocab_size=vocab_size, layout=layout, narrow=narrow)
    if not has_pixels:
        options |= {"token_indices": targets, "padding": padding, "native": natively}
    hidden = part(model, "inner")(**inputs, attention_mask=padding.mask, **options).last_hidden_state
    return cast(Tensor, targets.loss(0, model.lm_head, hidden, num_items_in_batch=num_items).loss)
