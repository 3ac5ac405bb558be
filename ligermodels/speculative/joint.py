"""Stage 2: a model and its heads, trained together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers import HeadLoss, Targets
from ligermodels.layers.quantized import check_unquantized
from ligermodels.layers.sharding import call_gathered, is_sharded
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.reference_kl import divergence
from ligermodels.speculative.medusa import MedusaModel
from ligermodels.speculative.output import MultiHeadOutput


def frozen_copy(model: CausalLM, place: Literal["device", "cpu_offload"] = "device") -> CausalLM:
    """A frozen copy of a model, as the reference.

    Args:
        model: the model. If `parallelize` has spread it, each rank copies its shards.
        place: "device", beside the model; or "cpu_offload": its blocks stay in host memory, and each is on the device
            only while it computes. Every pass then copies all blocks, which takes time; the results are the same.

    Returns:
        The copy, in evaluation mode.

    Raises:
        InputError: "cpu_offload" for a sharded model.
    """
    if is_sharded(model):
        if place != "device":
            raise InputError("reference: of a sharded model each rank keeps its share on the device; not 'cpu_offload'")
        from ligermodels.parallel.apply import parallel_copy  # a large import

        return parallel_copy(model)
    if place == "device":
        return copy.deepcopy(model).requires_grad_(False).eval()
    # The blocks' parameters are copied to the host at once: the device never holds a second set.
    on_host = {
        id(p): nn.Parameter(_host_copy(p.detach()), requires_grad=False) for p in model.decoder.blocks.parameters()
    }
    reference = copy.deepcopy(model, on_host).requires_grad_(False).eval()
    for block in reference.decoder.blocks:
        _fetch_for_forward(block, model.device)
    return reference


def _host_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def _fetch_for_forward(block: nn.Module, device: torch.device) -> None:
    """Have the parameters of `block` on `device` during its forward, and only then."""
    at_home = {p: p.data for p in block.parameters()}

    def fetch(*_: Any) -> None:
        for p, home in at_home.items():
            p.data = home.to(device, non_blocking=True)

    def release(*_: Any) -> None:
        for p, home in at_home.items():
            p.data = home

    block.register_forward_pre_hook(fetch)
    block.register_forward_hook(release, always_call=True)


class JointMedusa(nn.Module):
    """A Medusa model that also trains its base model: the loss is L_lm + heads_loss_weight * the heads' loss.

    L_lm is the base model's own loss; with a `reference` the mean of KL(reference || base) over the same targets.
    """

    def __init__(self, medusa: MedusaModel, reference: CausalLM | None = None) -> None:
        """Makes the base model's parameters trainable; the reference is no submodule, and its parameters are not
        trained."""
        super().__init__()
        if not isinstance(medusa, MedusaModel):
            raise InputError(f"medusa: must be a MedusaModel, got a {type(medusa).__name__}")
        if not isinstance(reference, CausalLM | None):
            raise InputError(f"reference: must be a native CausalLM, got a {type(reference).__name__}")
        self.medusa = medusa
        self._reference = (reference,)  # in a tuple: not registered as a submodule
        check_unquantized(medusa.base, "JointMedusa", "stage 2 trains the base model; load it without `quantize`")
        medusa.base.requires_grad_()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor,
        heads_loss_weight: Tensor | float = 1.0,
        **options: Any,
    ) -> MultiHeadOutput:
        """The joint loss.

        Args:
            input_ids: (B, T) long.
            labels: (B, T) long, aligned with `input_ids` (the model shifts them); -100 is ignored.
            heads_loss_weight: factor of the heads' loss.
            options: other arguments of `MedusaModel.forward`. `num_items_in_batch` is one number, or long (K + 1,) with
                the base model's number first: see `num_targets`. With a reference, options of the cross entropy, such
                as `token_weights`, apply to the heads only.

        Returns:
            The output of the heads, with the joint loss, and L_lm as `base_loss`.

        Raises:
            InputError: ids out of range (on a GPU: a device assertion), shapes that do not fit, an unknown option.
        """
        loss = partial(_joint_loss, self.medusa, self._reference[0])
        return call_gathered(self.medusa, loss, input_ids, labels, heads_loss_weight, **options)

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Count the targets of the base model and of each head.

        Args:
            labels: (B, T) long, -100 where ignored.
            position_ids: (B, T) long. Positions that restart mark packed documents.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row.
            attention_mask: (B, T), 1 on tokens and 0 on padding.

        Returns:
            Long (K + 1,), the base model's number first.
        """
        return self.medusa.num_targets(labels, position_ids, cu_seqlens, attention_mask, first=1)


def _joint_loss(
    medusa: MedusaModel,
    reference: CausalLM | None,
    input_ids: Tensor | None,
    labels: Tensor,
    heads_loss_weight: Tensor | float,
    **options: Any,
) -> MultiHeadOutput:
    base, batch = medusa.base, medusa.prepare(1, input_ids, labels, **options)
    targets = cast(Targets, batch.targets)
    loss_options = {name: value for name, value in options.items() if name not in _INPUTS}
    out = base(**batch.inputs)
    hidden = out["last_hidden_state"]
    output = medusa._heads_loss(medusa._head_states(hidden, batch), targets, **loss_options)
    numbers = loss_options.get("num_items_in_batch")
    items = None if numbers is None else torch.as_tensor(numbers).flatten()[0].to(hidden.device)
    base_loss: Callable[..., HeadLoss] = base.head_loss
    if reference is not None:
        with torch.no_grad():
            base_loss = _kl(base, reference, reference(**batch.inputs)["last_hidden_state"])
        loss_options = {name: loss_options[name] for name in ("reduction",) if name in loss_options}
    first = cast(Tensor, targets.loss(0, base_loss, hidden, **{**loss_options, "num_items_in_batch": items}).loss)
    total = first + heads_loss_weight * cast(Tensor, output.loss)
    if reference is None and out.aux_loss is not None:
        total = total + base.config.router_aux_loss_coef * targets.share(items) * out.aux_loss
    return replace(output, loss=total, base_loss=first.detach())


_INPUTS = ("attention_mask", "position_ids", "cu_seqlens", "inputs_embeds")


def _kl(base: CausalLM, reference: CausalLM, reference_hidden: Tensor) -> Callable[..., HeadLoss]:
    """KL(reference || base), called as an `LMHead` is for its loss."""

    def kl(hidden: Tensor, targets: Tensor, **options: Any) -> HeadLoss:
        size = base.config.vocab_size
        loss = divergence(hidden, base.head, reference_hidden, reference.logits, targets, vocab_size=size, **options)
        return HeadLoss(loss=loss)

    # Within the call the parameters of the base and of its head, which may be a group of its own, are gathered.
    return partial(call_gathered, base, partial(call_gathered, base.head, kl))
