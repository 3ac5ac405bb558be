"""TRL's trainers on the native head: log-probabilities and entropies of tokens by `ops.linear_log_probs`.

A trainer of TRL computes its loss from the result of `model(..., labels=labels, fused_lm_head=True)`. It sets a forward
on the model object (`trl.trainer.utils.add_fused_lm_head`) that projects hidden states by TRL's kernels. Here another
forward replaces it, on the same objects, with the same options and results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ligermodels.errors import InputError
from ligermodels.integrations.causal_lm import head_forward
from ligermodels.integrations.conditions import text_config
from ligermodels.integrations.in_place import base_model, composed, nativize
from ligermodels.integrations.inputs import Inputs, Padding
from ligermodels.integrations.modules import part, within_adapter
from ligermodels.integrations.settings import keeps_config
from ligermodels.integrations.token_statistics import OUTPUTS
from ligermodels.layers import IGNORE_INDEX, Targets
from ligermodels.losses.sequences import per_item

Trainer = TypeVar("Trainer")

TRL_VERSION = "1.16"
"""The version of TRL whose fused head this stands in for."""

FIELDS = {*OUTPUTS, "loss", "label_mask", "aux_loss"}
"""Of what TRL's fused head returns."""

FROM_THE_MODEL = {"original_forward", "text_config", "final_logit_softcapping", "logit_scale", "backbone_attr"}
"""What TRL's forward holds beside `HeadOptions`."""


class HeadOptions(NamedTuple):
    """The options of TRL's `add_fused_lm_head`."""

    temperature: float
    cast_lm_head_to_fp32: bool
    outputs: tuple[str, ...]


def use_native_head(trainer: Trainer) -> Trainer:
    """Let a trainer of TRL compute log-probabilities by `ops.linear_log_probs`; returns the same object.

    Call it once the trainer is made, before `train`. It is for the trainers that score tokens by TRL's fused head: SFT,
    DPO, KTO, GRPO and RLOO. Losses, gradients and metrics are the same. Of the policy, the head takes four matrix
    products per step, and two if it is frozen, as with LoRA, and entropies are not part of the loss.

    It concerns `trainer.model` (of a PEFT model the one within) and `trainer.ref_model`. Those that do not compute
    natively yet, such as a reference that TRL has loaded by its path, are nativized. Nothing but these objects changes.
    Results that the trainer has computed before, as with `precompute_ref_log_probs`, remain.

    Raises:
        InputError: it is no trainer of TRL, or one that does not use TRL's fused head; the fused head of the installed
            TRL differs from version 1.16; a module or adapter has taken the place of the model's head; or it was
            called for this trainer before. In training, for a loss computed from logits (SFT's `label_smoothing_factor`
            and `compute_loss_func`; GKD) and for `shift_labels` (context or sequence parallelism).
        ConfigError: a model is of a family that `nativize` does not support.
    """
    policy, accelerator = (getattr(trainer, name, None) for name in ("model", "accelerator"))
    if not isinstance(policy, nn.Module) or accelerator is None:
        raise InputError(f"use_native_head: expected a trainer of TRL, got {type(trainer).__name__}")
    wrapped = [each for each in (policy, getattr(trainer, "ref_model", None)) if each is not None]
    models = [base_model(accelerator.unwrap_model(each, keep_torch_compile=False)) for each in wrapped]
    found = [(each, _head_options(type(trainer).__name__, each)) for each in models]
    for model, options in found:
        _check_head(model, options)
    for model, options in found:
        if "native" not in vars(model):
            _nativize(model, options)
    for model, options in found:
        _replace_head(model, options, accelerator)
    return trainer


def _head_options(trainer: str, model: Any) -> HeadOptions:
    """The options of the fused head that the trainer has given to the model."""
    import trl
    from trl.trainer import utils

    wanted = f"use_native_head: stands in for the fused head of trl {TRL_VERSION}, which trl {trl.__version__}"
    if not hasattr(utils, "add_fused_lm_head"):
        raise InputError(f"{wanted} does not have")
    function = _set_by_trainer(model)
    if any(_is_from(each, globals()) for each in (model.forward, function)):
        raise InputError(f"use_native_head: the {type(model).__name__} of this {trainer} has the native head already")
    if not _is_from(function, vars(utils)):
        raise InputError(
            f"use_native_head: {trainer} has not set TRL's fused head on its {type(model).__name__}: its loss is not "
            "computed from that head's log-probabilities. ligermodels.losses has losses without logits"
        )
    held = inspect.getclosurevars(function.__func__).nonlocals
    fields = set(utils.FusedCausalLMOutput.__dataclass_fields__)
    same = set(held) == {*HeadOptions._fields, *FROM_THE_MODEL} and fields == FIELDS
    if not same or not set(held["outputs"]) <= set(OUTPUTS):
        raise InputError(f"{wanted} has changed")
    return HeadOptions(*(held[name] for name in HeadOptions._fields))


def _set_by_trainer(model: Any) -> Any:
    """The forward of the model, without the wrapper that accelerate adds for mixed precision."""
    return vars(model).get("_original_forward", model.forward)


def _is_from(method: Any, module: dict[str, Any]) -> bool:
    """Whether `method` is a method, and its function was defined in the module with these globals."""
    function = getattr(method, "__func__", None)
    return isinstance(function, FunctionType) and function.__globals__ is module


def _check_head(model: Any, options: HeadOptions) -> None:
    """InputError unless the head computes natively, or will after `nativize`."""
    head = model.lm_head
    adapted, cast = within_adapter(head) is not head, options.cast_lm_head_to_fp32
    if adapted and cast:
        raise InputError("use_native_head: cast_lm_head_to_fp32 is not supported with an adapter on lm_head")
    native = "native" in vars(model)
    if (adapted and not native) or (native and not cast and not all(_is_native_head(each) for each in _heads(head))):
        raise InputError(
            f"use_native_head: lm_head is a {type(head).__name__}, which does not compute natively; nativize the model "
            "before get_peft_model, and leave lm_head out of target_modules"
        )


def _nativize(model: Any, options: HeadOptions) -> None:
    """Nativize a model that has TRL's forwards: they are removed for the call, because `nativize` refuses them."""
    modules = (model, model.lm_head) if options.cast_lm_head_to_fp32 else (model,)
    set_by_trl = {each: vars(each).pop("forward") for each in modules}
    try:
        nativize(model)
    finally:
        for each, forward in set_by_trl.items():
            vars(each)["forward"] = forward


def _replace_head(model: Any, options: HeadOptions, accelerator: Any) -> None:
    head = model.lm_head
    if options.cast_lm_head_to_fp32:
        vars(head)["forward"] = functools.partial(_fp32_head_forward, head, vars(head)["forward"])
    # Under mixed precision accelerate wraps the forward of a model that it prepares; the reference is prepared already.
    context = accelerator.autocast if "_original_forward" in vars(model) else nullcontext
    model.forward = MethodType(_forward_for(type(model), model.forward, options, context), model)


def _heads(head: Any) -> list[nn.Module]:
    """The modules that may run as this head: the head, or with PEFT's `modules_to_save` the original and its copies."""
    copies = getattr(head, "modules_to_save", None)
    return [head] if copies is None else [head.original_module, *copies.values()]


def _is_native_head(head: nn.Module) -> bool:
    forward = vars(head).get("_old_forward", vars(head).get("forward"))  # the former under accelerate's hooks
    return getattr(forward, "func", None) is head_forward


def _fp32_head_forward(head: Any, theirs: Callable[..., Any], hidden: Tensor, *args: Any, **options: Any) -> Any:
    """As `head_forward`, but logits as TRL computes them for `cast_lm_head_to_fp32`."""
    return head_forward(head, hidden, *args, **options) if args or options else theirs(hidden)


def _forward_for(
    kind: type, theirs: Callable[..., Any], options: HeadOptions, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    @functools.wraps(kind.forward)  # type: ignore[attr-defined]  # whose signature Trainer and generate read
    def forward(model: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            if model.training and torch.is_grad_enabled() and kwargs.get("labels") is None:
                raise InputError(
                    "use_native_head: this trainer computes its loss from logits, as GKDTrainer does and SFTTrainer "
                    "with label_smoothing_factor or compute_loss_func; leave use_native_head out"
                )
            return theirs(*args, **kwargs)
        with context():
            return _fused_outputs(model, options, *args, **kwargs)

    return forward


def _changed_head(model: Any) -> dict[str, Any]:
    """The option `config` of `head_forward`, if the config of the model was changed since `nativize`."""
    unchanged = keeps_config(text_config(model), model.native.config_settings)
    return {} if unchanged else {"config": composed(model)[0].head}


def _fused_outputs(
    model: Any,
    options: HeadOptions,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **kwargs: Any,
) -> Any:
    """The `FusedCausalLMOutput` of TRL: of each label but the first, (B, T - 1)."""
    from trl.trainer.utils import FusedCausalLMOutput

    if shift_labels is not None:
        raise InputError(
            "shift_labels: come of context or sequence parallelism, which native attention does not support"
        )
    if labels is None:
        raise InputError("labels: fused_lm_head=True gives log-probabilities of labels; give them")
    config = text_config(model)
    inputs: Inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
    padding = Padding(attention_mask, inputs, labels)
    # Made first, so that their number is on the host by the time that the head needs it.
    targets = Targets(labels, (1,), vocab_size=config.vocab_size)
    kwargs |= {"past_key_values": past_key_values, "use_cache": False}
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    found = part(model, "inner")(
        **inputs, attention_mask=attention_mask, padding=padding, native=not padding.is_labelled, **kwargs
    )
    hidden, shifted, cast = found.last_hidden_state, targets.values[0], options.cast_lm_head_to_fp32
    hidden = hidden.float() if cast else hidden
    with torch.autocast(hidden.device.type, enabled=False) if cast else nullcontext():
        statistics = model.lm_head(
            hidden,
            shifted,
            outputs=options.outputs,
            temperature=options.temperature,
            num_targets=targets.wait_for_count(0),
            **_changed_head(model),
        )
    statistics = {name: each[:, :-1] for name, each in statistics.items()}
    mask = shifted[:, :-1] != IGNORE_INDEX
    count = mask.sum() if num_items_in_batch is None else num_items_in_batch
    loss, aux_loss = per_item(-statistics["log_probs"].sum(), count), None
    if kwargs.get("output_router_logits"):
        aux_loss = load_balancing_loss_func(
            found.router_logits, config.num_experts, config.num_experts_per_tok, attention_mask
        )
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(loss=loss, **statistics, label_mask=mask, aux_loss=aux_loss)
