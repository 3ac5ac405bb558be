"""Forwards of a transformers backbone and causal language model that compute natively, with transformers' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)

from ligermodels.errors import InputError
from ligermodels.integrations.decoder import DecoderView
from ligermodels.integrations.inputs import (
    check_document_bounds,
    check_embeddings,
    check_inputs,
    check_logits_to_keep,
    check_loss_inputs,
    check_positions,
    check_within_vocabulary,
)
from ligermodels.integrations.modules import has_hooks, is_ours, layer_forward, mixer_forward, part
from ligermodels.integrations.token_statistics import token_statistics
from ligermodels.integrations.views import AddedFeatures, GridRope, text_positions
from ligermodels.layers import IGNORE_INDEX, MoEConfig, Targets
from ligermodels.layers.lm_head import head_loss
from ligermodels.layers.packing import bounds_of
from ligermodels.layers.tokens import Unpadding, packed_layout

Inputs = dict[str, Any]
"""input_ids, inputs_embeds, position_ids (each a tensor or None), of one batch or packed row."""

SWITCHES = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Arguments, or fields of the config, that ask for what the native pass does not keep."""

UNUSED = frozenset({"cu_seq_lens_k", "max_length_q", "max_length_k", "cache_position", "num_items_in_batch", "seq_idx"})
UNUSED |= {"labels"}  # that a multimodal model passes on
"""Further arguments that the native pass has no need of."""


class NoCache:
    """In place of the cache that transformers, by its config, would have returned: given back, it is an error."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"past_key_values.{name}: this pass kept no cache; ask for it by use_cache=True")


NO_CACHE = NoCache()


def backbone_forward(
    backbone: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    token_indices: Targets | None = None,
    padding: Padding | None = None,
    native: bool = True,
    per_layer_inputs: Tensor | None = None,
    logits_to_keep: int | Tensor | None = None,
    visual_pos_masks: Tensor | None = None,
    deepstack_visual_embeds: Sequence[Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """The states after the final norm as `last_hidden_state`: (B, T, H), zero on padding.

    Args:
        cu_seq_lens_q: int32 (n + 1,), bounds of documents packed into one row; by default positions that restart.
        token_indices: the states of the tokens with a target alone, (1, n, H), of those without padding.
        padding: of `attention_mask`, if it is known.
        native: False for the class's own forward, in any case.
        per_layer_inputs: (B, T, layers, P), beside `inputs_embeds`: see `Decoder.forward`.
        logits_to_keep: is of no use here: the model takes the states that it needs.
        visual_pos_masks, deepstack_visual_embeds: bool (B, T), and for each of the first layers the features (n, H)
            that are added to its result for these n tokens.

    With a cache, a mask for each pair of tokens, padding between tokens, dropout, hooks on what is in the layers, or a
    request for the attentions or hidden states of all layers, the class's own forward runs: see `runs_natively`.
    """
    inputs: Inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
    _check_inputs(backbone, inputs, attention_mask, past_key_values)
    check_within_vocabulary(input_ids, backbone.embed_tokens)
    if input_ids is not None or inputs_embeds is not None:
        check_embeddings(inputs_embeds, backbone)
        check_positions(position_ids, _shape(inputs), text_config(backbone), backbone.device)
        check_document_bounds(cu_seq_lens_q, _shape(inputs), backbone.device)
    options: dict[str, Any] = {"past_key_values": past_key_values, "use_cache": use_cache, **kwargs}
    padding, counted_on = padding or Padding(attention_mask, inputs), native
    native = native and runs_natively(backbone, inputs, padding, options) and _layers_are_ours(backbone)
    native = native and not (padding.exists and backbone.native.rope_by_length)
    by_token = backbone.native.config.per_layer_inputs is not None
    native = native and (per_layer_inputs is None) == (input_ids is not None or not by_token)
    in_grid = position_ids is not None and position_ids.ndim == 3
    native = native and not (in_grid and not _reads_grids(backbone))
    # Positions between whole ones interpolate, in transformers; natively documents would begin there.
    native = native and (position_ids is None or in_grid or not position_ids.is_floating_point())
    # The last layer may compute some tokens alone.
    added = deepstack_visual_embeds or ()
    native = native and len(added) < len(backbone.layers) and not (added and visual_pos_masks is None)
    if not native:
        more: dict[str, Any] = {
            "cu_seq_lens_q": cu_seq_lens_q,
            "per_layer_inputs": per_layer_inputs,
            "logits_to_keep": logits_to_keep,
            "visual_pos_masks": visual_pos_masks,
            "deepstack_visual_embeds": deepstack_visual_embeds,
        }
        options |= {name: value for name, value in more.items() if value is not None}
        found = type(backbone).forward(backbone, **inputs, attention_mask=attention_mask, **options)
        if counted_on and token_indices is not None:
            found.last_hidden_state = _taken(found.last_hidden_state, padding, token_indices)
        return found
    check_checkpointing(backbone)
    unpad, grid = padding.unpadding(), None
    if visual_pos_masks is not None and unpad is not None:
        if added:  # an image's tokens may be padding
            real = cast(Tensor, padding.mask).bool()[visual_pos_masks]
            added = [each[real.to(each.device)] for each in added]
        visual_pos_masks = unpad.take(visual_pos_masks)
    view = DecoderView(backbone, added=[AddedFeatures(cast(Tensor, visual_pos_masks), each) for each in added])
    if position_ids is not None and in_grid:
        inputs["position_ids"], grid = text_positions(position_ids)
    inputs = with_all_positions(inputs)
    if unpad is not None:
        if input_ids is not None:  # noise on embeddings (NEFTune) goes by the shape that transformers gives them
            inputs |= {"input_ids": input_ids if by_token else None, "inputs_embeds": view.embed(input_ids)}
        per_layer_inputs = None if per_layer_inputs is None else unpad.take(per_layer_inputs)
        inputs = {name: None if x is None else unpad.take(x) for name, x in inputs.items()}
        grid = None if grid is None else unpad.take(grid)
        cu_seq_lens_q = unpad.cu_seqlens
    elif cu_seq_lens_q is None and padding.mask is None and padding.positions is not None:
        cu_seq_lens_q = None if inputs["position_ids"] is None else bounds_of(inputs["position_ids"])
    if grid is not None:
        view.ropes = [GridRope(view.ropes[0].config, backbone.rotary_emb, grid)]
    hidden = view(
        **inputs,
        cu_seqlens=None if cu_seq_lens_q is None else cu_seq_lens_q.to(torch.int32),
        token_indices=token_indices,
        per_layer_inputs=per_layer_inputs,
    )
    hidden = hidden if unpad is None or token_indices is not None else unpad.restore(hidden)
    kind = MoeModelOutputWithPast if _gives_router_logits(backbone) else BaseModelOutputWithPast
    kind = backbone.native.output or kind
    return kind(last_hidden_state=hidden, past_key_values=_no_cache(backbone, use_cache))


def causal_lm_forward(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> Any:
    """As the class's own forward, on the native backbone.

    In training, the loss of `labels` is computed without logits, and `logits` of the result are None. Raises InputError
    for what `check_inputs` names, and what the class's own forward raises.
    """
    inputs: Inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
    _check_inputs(model, inputs, attention_mask, past_key_values)
    options: dict[str, Any] = {"past_key_values": past_key_values, "use_cache": use_cache, **kwargs}
    if input_ids is not None or inputs_embeds is not None:
        rows, length = _shape(inputs)
        kept = check_logits_to_keep(logits_to_keep, length)
        if labels is not None and model.loss_function is ForCausalLMLoss:
            check_loss_inputs(labels, rows * kept, text_config(model).vocab_size, model.device, kwargs)
    if labels is not None:
        padding = Padding(attention_mask, inputs, labels)
        if padding.is_labelled:
            options["native"] = False
        elif getattr(labels, "shape", None) == _shape(inputs) and _loss_is_fused(
            model, inputs, padding, logits_to_keep, options
        ):
            kind = MoeCausalLMOutputWithPast if _gives_router_logits(model) else CausalLMOutputWithPast
            kind = model.native.output or kind
            loss = _loss(model, inputs, padding, labels, options)
            return kind(loss=loss, past_key_values=_no_cache(model, use_cache))
    options |= {"labels": labels, "logits_to_keep": logits_to_keep}
    return type(model).forward(model, **inputs, attention_mask=attention_mask, **options)


def head_forward(head: Any, hidden: Tensor, targets: Tensor | None = None, **options: Any) -> Any:
    """hidden (..., H) -> logits (..., V), without scale and softcap; with targets (...) their loss, with both.

    With targets and `outputs`, the names of what TRL asks for, these: see `token_statistics`.
    """
    if targets is None:
        return type(head).forward(head, hidden)
    compute = token_statistics if "outputs" in options else head_loss
    return compute(head.native.config, hidden, head.weight, targets, head.bias, **options)


class Padding:
    """What an attention mask says of a batch, by one sync on a GPU; nothing is known of masks other than (B, T).

    mask: the mask; None without any.
    positions: the positions that came with it; None without any.
    at_ends: whether it is None or (B, T), and no row has padding between tokens, which transformers counts for
        positions and windows.
    exists: whether there is padding.
    is_labelled: whether a label lies on padding or, as on the first token after padding on the left, is predicted from
        it. transformers counts these, by states of padding that depend on how its attention is implemented.
    """

    def __init__(self, attention_mask: Any, inputs: Inputs, labels: Tensor | None = None) -> None:
        self.mask: Tensor | None = attention_mask
        self.positions: Tensor | None = inputs["position_ids"]
        self.at_ends, self.exists, self.is_labelled = attention_mask is None, False, False
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != _shape(inputs):
            return
        real = attention_mask != 0
        starts = real[:, :1].sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
        labelled = real.new_zeros(())
        if isinstance(labels, Tensor) and labels.shape == real.shape:
            counts = labels != IGNORE_INDEX
            labelled = (counts & ~real).any() | (counts[:, 1:] & ~real[:, :-1]).any()
        is_mask = (~real | (attention_mask == 1)).all()
        found = torch.stack([(starts <= 1).all(), ~real.all(), labelled, is_mask])
        self.at_ends, self.exists, self.is_labelled, is_mask = found.tolist()
        if not is_mask:
            raise InputError("attention_mask: may hold only 1 (a token) and 0 (padding)")

    def unpadding(self) -> Unpadding | None:
        """What takes it out of a batch; None without any."""
        return Unpadding(self.mask) if self.exists and self.mask is not None else None


def runs_natively(module: Any, inputs: Inputs, padding: Padding, options: dict[str, Any]) -> bool:
    """Whether the native pass gives all that these arguments, and the config of a backbone or model, ask for."""
    config, rest = text_config(module), dict(options)
    if isinstance(rest.get("past_key_values"), NoCache):
        raise InputError("past_key_values: the pass that gave these kept no cache; ask for it by use_cache=True")
    wanted = [rest.pop(name, None) for name in SWITCHES]
    wanted = [getattr(config, name, False) if w is None else w for name, w in zip(SWITCHES, wanted, strict=True)]
    return (
        not any(wanted)
        and rest.pop("return_dict", None) in (None, True)
        and not rest.pop("use_cache", None)
        and all(value is None or name in UNUSED for name, value in rest.items())
        and (inputs["input_ids"] is None) != (inputs["inputs_embeds"] is None)
        and padding.at_ends
        and not (module.training and getattr(config, "attention_dropout", 0.0))
    )


def with_all_positions(inputs: Inputs) -> Inputs:
    """`inputs` with positions for every sequence of the batch: transformers takes (1, T) for all."""
    positions = inputs["position_ids"]
    return inputs if positions is None else {**inputs, "position_ids": positions.expand(_shape(inputs)[0], -1)}


def _check_inputs(module: Any, inputs: Inputs, attention_mask: Any, past_key_values: Any) -> None:
    cache = None if isinstance(past_key_values, NoCache) else past_key_values  # `runs_natively` refuses it
    tokens = inputs["input_ids"], inputs["inputs_embeds"]
    check_inputs(*tokens, attention_mask, cache, text_config(module), module.device)


def _shape(inputs: Inputs) -> tuple[int, int]:
    """(B, T)."""
    tokens: Tensor = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
    return tokens.shape[0], tokens.shape[1]


def _layers_are_ours(backbone: Any) -> bool:
    """Whether all layers are called as we call them; adapters and hooks may expect transformers' arguments."""
    ours = all(is_ours(x, layer_forward) and is_ours(part(x, "mixer"), mixer_forward) for x in backbone.layers)
    return ours and not has_hooks(each for whole in (backbone.layers, backbone.norm) for each in whole.modules())


def _reads_grids(backbone: Any) -> bool:
    """Whether its one rotary embedding takes the time, height and width of tokens."""
    settings = getattr(backbone.config, "rope_parameters", None) or {}
    return "mrope_section" in settings and len(backbone.native.ropes) == 1


def _taken(hidden: Tensor, padding: Padding, targets: Targets) -> Tensor:
    """hidden (B, T, H), with padding -> the states that the native pass gives for `targets`."""
    unpad = padding.unpadding()
    hidden = hidden if unpad is None else unpad.take(hidden)
    needed = targets.wait_for_needed()
    return hidden if needed is None else needed.take(hidden)


def check_checkpointing(backbone: Any) -> None:
    """Raises InputError where gradient checkpointing would lose gradients: torch's older kind sees those of a layer's
    arguments alone, not of what earlier layers share and of inputs of a layer, which are in its context."""
    config = backbone.native.config
    if not backbone.training or not (config.per_layer_inputs or any(b.mixer.state_from for b in config.blocks)):
        return
    for layer in backbone.layers:
        options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
        if getattr(layer, "gradient_checkpointing", False) and options.get("use_reentrant"):
            raise InputError(
                "gradient_checkpointing_kwargs: use_reentrant=True loses gradients of what layers of this model share; "
                "give use_reentrant=False"
            )


def _no_cache(module: Any, use_cache: bool | None) -> NoCache | None:
    """What stands for the cache that transformers would have returned."""
    return NO_CACHE if use_cache is None and getattr(text_config(module), "use_cache", False) else None


def text_config(module: Any) -> Any:
    """That of the language model, of the config of a transformers model."""
    return module.config.get_text_config()


def _gives_router_logits(module: Any) -> bool:
    """Whether outputs of its class have a place for them, as those of families whose config can ask for them."""
    has_experts = any(isinstance(block.mlp, MoEConfig) for block in module.native.config.blocks)
    return has_experts or hasattr(text_config(module), "output_router_logits")


def _loss_is_fused(
    model: Any, inputs: Inputs, padding: Padding, logits_to_keep: int | Tensor, options: dict[str, Any]
) -> bool:
    """Whether the loss is computed without logits: in training, if loss and head are the usual ones, and nobody asks
    for logits or has a hook where they pass."""
    if isinstance(logits_to_keep, Tensor) or logits_to_keep or not is_ours(model.lm_head, head_forward):
        return False
    around = (part(model, "backbone"), part(model, "inner"), *model.lm_head.modules())
    if not model.training or has_hooks(around):
        return False
    own = {"cu_seq_lens_q", *model.native.inputs}
    known = {name: value for name, value in options.items() if name not in own}
    return model.loss_function is ForCausalLMLoss and runs_natively(model, inputs, padding, known)


def _loss(model: Any, inputs: Inputs, padding: Padding, labels: Tensor, options: dict[str, Any]) -> Tensor:
    num_items = options.pop("num_items_in_batch", None)
    backbone, unpad = part(model, "backbone"), padding.unpadding()
    natively, bounds = _layers_are_ours(backbone) and not (padding.exists and backbone.native.rope_by_length), None
    # What pixels become, and how it is read, is left to the class: it may pass what it is given on to its towers.
    beside = any(options.get(name) is not None for name in model.native.inputs)
    whole = beside or not natively
    if not whole and unpad is not None:
        labels, bounds = unpad.take(labels), unpad.cu_seqlens
    # Of documents that a caller packed, transformers lets the last token predict the next one's first label.
    layout = packed_layout((labels.shape[0], labels.shape[1]), bounds)
    targets = Targets(labels, (1,), vocab_size=text_config(model).vocab_size, layout=layout, every_token=whole)
    if not beside:
        options |= {"token_indices": targets, "padding": padding, "native": natively}
    hidden = part(model, "inner")(**inputs, attention_mask=padding.mask, **options).last_hidden_state
    return cast(Tensor, targets.loss(0, model.lm_head, hidden, num_items_in_batch=num_items).loss)
