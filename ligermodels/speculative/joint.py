"""Stage 2: a model and its heads, trained together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ligermodels.arguments import check_number
from ligermodels.errors import InputError, short
from ligermodels.layers import HeadLoss, Targets
from ligermodels.layers.lm_head import given_options
from ligermodels.layers.quantized import check_unquantized
from ligermodels.layers.sharding import call_gathered, is_sharded, reshard_before_pass
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import RefusesDropout
from ligermodels.models.reference_kl import divergence
from ligermodels.models.routing import router_loss
from ligermodels.speculative.medusa import MedusaModel
from ligermodels.speculative.output import MultiHeadOutput


def frozen_copy(model: CausalLM, place: Literal["device", "cpu_offload"] = "device") -> CausalLM:
    """A frozen copy of a model, for use as the reference.

    Args:
        model: the model. If `parallelize` has sharded it, each rank copies its shards.
        place: "device", the model's device; or "cpu_offload": the copy's blocks stay in host memory, and each block is
            copied to the device while it computes. This is slower, and the results are the same.

    Returns:
        The copy, in evaluation mode.

    Raises:
        InputError: another `place`, or "cpu_offload" for a sharded model.

    Examples:
        >>> joint = lm.JointMedusa(medusa, reference=frozen_copy(medusa.base))
    """
    if place not in ("device", "cpu_offload"):
        raise InputError(f"place: must be 'device' or 'cpu_offload', got {short(place)}")
    if is_sharded(model):
        if place != "device":
            raise InputError("reference: 'cpu_offload' is not implemented for a sharded model; give 'device'")
        from ligermodels.parallel.apply import parallel_copy  # a large import

        return parallel_copy(model)
    if place == "device":
        return copy.deepcopy(model).requires_grad_(False).eval()
    # deepcopy takes the parameters in its memo as they are: the device never holds a second set of the blocks.
    memo = {id(p): nn.Parameter(_host_copy(p.detach()), requires_grad=False) for p in model.decoder.blocks.parameters()}
    reference = copy.deepcopy(model, memo).requires_grad_(False).eval()
    for block in reference.decoder.blocks:
        _fetch_for_forward(block, model.device)
    return reference


def _host_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def _fetch_for_forward(block: nn.Module, device: torch.device) -> None:
    """Copy the parameters of `block` to `device` for the duration of its forward."""
    host_tensors = {p: p.data for p in block.parameters()}

    def fetch(*_: Any) -> None:
        for p, host_tensor in host_tensors.items():
            p.data = host_tensor.to(device, non_blocking=True)

    def release(*_: Any) -> None:
        for p, host_tensor in host_tensors.items():
            p.data = host_tensor

    block.register_forward_pre_hook(fetch)
    block.register_forward_hook(release, always_call=True)


class JointMedusa(RefusesDropout):
    """Trains a Medusa model's base model together with its heads: loss = L_lm + heads_loss_weight * L_heads.

    L_lm is the base model's own loss; with a `reference`, the mean of KL(reference || base) over the same targets.

    Args:
        medusa: the model. Its base model's parameters become trainable.
        reference: a frozen model with the same vocabulary, such as `frozen_copy(medusa.base)`. It is not registered as
            a submodule, so that its parameters are neither trained nor saved.

    Raises:
        InputError: an argument of a wrong type, a quantised base model, or a reference that is the base model itself
            or has another vocabulary.

    Examples:
        >>> joint = lm.JointMedusa(medusa)
        >>> joint(input_ids, labels=input_ids, heads_loss_weight=0.2).loss.backward()
    """

    def __init__(self, medusa: MedusaModel, reference: CausalLM | None = None) -> None:
        super().__init__()
        if not isinstance(medusa, MedusaModel):
            raise InputError(f"medusa: must be a MedusaModel, got a {type(medusa).__name__}")
        if not isinstance(reference, CausalLM | None):
            raise InputError(f"reference: must be a native CausalLM, got a {type(reference).__name__}")
        if reference is medusa.base:
            raise InputError(
                "reference: is the base model itself, so the KL to it is always 0; give frozen_copy(model)"
            )
        if reference is not None and reference.config.vocab_size != (size := medusa.base.config.vocab_size):
            raise InputError(f"reference: has {reference.config.vocab_size:,} tokens, and the base model {size:,}")
        self.medusa = medusa
        self._reference = (reference,)  # in a tuple: not registered as a submodule
        check_unquantized(medusa.base, "JointMedusa", "stage 2 trains the base model; load it without `quantize`")
        medusa.base.requires_grad_()

    @property
    def trained_model(self) -> MedusaModel:
        """The model with its heads, for callbacks."""
        return self.medusa

    @property
    def unrecordable(self) -> str:
        """Why steps are not recorded in CUDA graphs; "" if they are."""
        has_reference = self._reference[0] is not None
        return "the KL to a reference is computed for a number of targets that the host reads" if has_reference else ""

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor,
        heads_loss_weight: Tensor | float = 1.0,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **loss_options: Any,
    ) -> MultiHeadOutput:
        """The joint loss.

        Args:
            input_ids: (B, T) long.
            labels: (B, T) long, aligned with `input_ids` (the model shifts them); -100 is ignored.
            heads_loss_weight: factor of the heads' loss, a number of at least 0, or a tensor.
            attention_mask: (B, T), 1 on tokens and 0 on padding, on either side.
            position_ids: (B, T) long. Positions that do not rise by 1 mark documents packed into a row.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1). Targets never cross the end
                of a document.
            inputs_embeds: (B, T, H) in place of `input_ids`.
            loss_options: options of `MedusaModel.forward`. `num_items_in_batch` is one number, or (K + 1,), the base
                model's number first: see `num_targets`. With a reference, `reduction`, `num_items_in_batch` and
                `memory_budget` apply to L_lm too; the other options, such as `token_weights`, to the heads only.

        Returns:
            The output of the heads, with the joint loss as `loss` and L_lm as `base_loss`.

        Raises:
            InputError: ids out of range (on a GPU: a device assertion), shapes that do not fit, an unknown option.
        """
        if labels is None:
            raise InputError("labels: the joint loss needs them; for logits call the model with its heads")
        if not isinstance(heads_loss_weight, Tensor):
            check_number("heads_loss_weight", heads_loss_weight)
        inputs = {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cu_seqlens": cu_seqlens,
            "inputs_embeds": inputs_embeds,
        }
        loss = partial(_joint_loss, self.medusa, self._reference[0])
        reshard_before_pass(self.medusa)
        return call_gathered(self.medusa, loss, heads_loss_weight, inputs, **loss_options)

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The numbers of targets of the base model and of each head, long (K + 1,), the base model's first. See
        `MultiHeadModel.num_targets` for labels, position_ids, cu_seqlens and attention_mask."""
        return self.medusa.num_targets(labels, position_ids, cu_seqlens, attention_mask, first=1)


def _joint_loss(
    medusa: MedusaModel,
    reference: CausalLM | None,
    heads_loss_weight: Tensor | float,
    inputs: dict[str, Any],
    **loss_options: Any,
) -> MultiHeadOutput:
    base, batch = medusa.base, medusa.prepare(1, inputs, loss_options)
    targets, loss_options = cast(Targets, batch.targets), given_options(loss_options)
    out = base(**batch.inputs)
    hidden = out["last_hidden_state"]
    output = medusa._heads_loss(medusa._head_states(hidden, batch), targets, **loss_options)
    numbers = loss_options.get("num_items_in_batch")
    items = None if numbers is None else torch.as_tensor(numbers).flatten()[0].to(hidden.device)
    base_loss: Callable[..., HeadLoss] = base.head_loss
    if reference is not None:
        with torch.no_grad():
            base_loss = _kl(base, reference, reference(**batch.inputs)["last_hidden_state"])
        loss_options = {name: loss_options[name] for name in ("reduction", "memory_budget") if name in loss_options}
    first = cast(Tensor, targets.loss(0, base_loss, hidden, **{**loss_options, "num_items_in_batch": items}).loss)
    total = first + heads_loss_weight * cast(Tensor, output.loss)
    if reference is None and (of_routers := router_loss(base, out)) is not None:
        total = total + targets.share(items, loss_options.get("reduction")) * of_routers
    return replace(output, loss=total, base_loss=first.detach())


def _kl(base: CausalLM, reference: CausalLM, reference_hidden: Tensor) -> Callable[..., HeadLoss]:
    """KL(reference || base) with the signature of `LMHead.forward` with targets."""

    def kl(hidden: Tensor, targets: Tensor, **options: Any) -> HeadLoss:
        size = base.config.vocab_size
        loss = divergence(hidden, base.head, reference_hidden, reference.logits, targets, vocab_size=size, **options)
        return HeadLoss(loss=loss)

    # Gathers the parameters of the base and of its head, which may be FSDP groups of their own.
    return partial(call_gathered, base, partial(call_gathered, base.head, kl))
