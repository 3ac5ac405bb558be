"""Deprecated arguments of `CausalLM.forward`, which methods replace, and properties. They work for one release."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.checkpointing import ActivationCheckpointing
from ligermodels.layers.lm_head import as_head_loss, check_log_prob_options, check_loss_options, given_options
from ligermodels.models.inputs import requested_returns
from ligermodels.models.output import CausalLMOutput
from ligermodels.models.passes import ModelInputs

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM

DEPRECATED = frozenset({"return_log_probs", "return_entropy", "last_hidden_state", "targets"})
_RECOMPUTE: dict[str, ActivationCheckpointing] = {"nothing": "none", "activations": "selective", "blocks": "full"}


class DeprecatedNames:
    """Deprecated properties of a `CausalLM`."""

    activation_checkpointing: ActivationCheckpointing

    @property
    def recompute(self) -> str:
        """Deprecated: `activation_checkpointing`."""
        mode = self.activation_checkpointing
        return next((old for old, new in _RECOMPUTE.items() if new == mode), mode)

    @recompute.setter
    def recompute(self, what: str) -> None:
        warnings.warn("model.recompute is now model.activation_checkpointing", DeprecationWarning, stacklevel=2)
        if not isinstance(what, str) or what not in _RECOMPUTE:
            raise InputError(f"recompute: must be one of {', '.join(_RECOMPUTE)}, got {what!r}")
        self.activation_checkpointing = _RECOMPUTE[what]


def deprecated_call(
    model: CausalLM, inputs: ModelInputs, returns: dict[str, bool], options: dict[str, Any], **states: Any
) -> CausalLMOutput | None:
    """`CausalLM.forward` with deprecated arguments.

    Args:
        model: the model.
        inputs: the tokens, and everything that belongs to them.
        returns: `return_z_loss` and `return_predicted`.
        options: the options of the loss, and the deprecated arguments, which are removed from them.
        states: `with_logits` and `with_last_hidden_state`, for log-probabilities.

    Returns:
        The output; None if all deprecated arguments are None or False.

    Raises:
        InputError: an argument does not go with another.
    """
    deprecated = {name: options.pop(name, None) for name in DEPRECATED}
    if all(value is None or value is False for value in deprecated.values()):
        return None
    hidden, targets = deprecated["last_hidden_state"], deprecated["targets"]
    asked = requested_returns(inputs.labels if hidden is None else targets, **returns)
    if hidden is not None or targets is not None:
        _check_head_inputs(inputs, hidden, deprecated)
        return _head_alone(model, hidden, targets, {**given_options(options), **asked}, asked)
    if not deprecated["return_log_probs"]:
        raise InputError("return_entropy: goes with return_log_probs")
    _warn("return_log_probs=True", "model.log_probs(input_ids, labels)")
    options = check_log_prob_options({**options, "return_z_loss": asked.pop("return_z_loss", None)}, inputs.labels)
    asked["return_entropy"] = bool(deprecated["return_entropy"])
    return model._log_probs(inputs, **states, **asked, **options)


def _head_alone(
    model: CausalLM, hidden: Any, targets: Tensor | None, options: dict[str, Any], asked: dict[str, bool]
) -> CausalLMOutput:
    _warn("last_hidden_state=", "model.logits(hidden) or model.head_loss(hidden, targets)")
    if targets is None:
        check_loss_options(options, None, "targets")
        return CausalLMOutput(logits=model.head(hidden))
    result = as_head_loss(model.head(hidden, targets, **options), asked)
    return CausalLMOutput(loss=result.loss, ranks=result.ranks, z_loss=result.z_loss, predicted=result.predicted)


def _check_head_inputs(inputs: ModelInputs, hidden: Tensor | None, deprecated: dict[str, Any]) -> None:
    if hidden is None:
        raise InputError("targets: go with last_hidden_state; give labels with inputs")
    if inputs.input_ids is not None or inputs.inputs_embeds is not None or inputs.labels is not None:
        raise InputError("last_hidden_state: is in place of inputs; give no ids, embeddings or labels with it")
    if inputs.return_hidden_states is not None:
        raise InputError("return_hidden_states: is of a pass through the blocks; give no last_hidden_state with it")
    if deprecated["return_log_probs"] or deprecated["return_entropy"]:
        raise InputError("return_log_probs: is of labels, not of last_hidden_state; give inputs and labels")


def _warn(argument: str, method: str) -> None:
    # past this file, `CausalLM.forward`, its decorator and nn.Module's __call__
    level = 7 if argument.startswith("return") else 8
    warnings.warn(f"model(..., {argument}) is now {method}", DeprecationWarning, stacklevel=level)
