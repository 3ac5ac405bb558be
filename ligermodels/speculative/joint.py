"""Stage 2: a model and its heads, trained together."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ligermodels.archs.causal_lm import CausalLM
from ligermodels.layers.sharding import as_forward
from ligermodels.speculative.medusa import MedusaModel, MedusaOutput


def frozen_copy(model: CausalLM, place: Literal["device", "cpu_offload"] = "device") -> CausalLM:
    """`model` as it is now, which is to stay so: the reference.

    Args:
        place: "device", beside the model; or "cpu_offload", where its blocks stay in host memory and each is on the
            device only while it computes. Every pass then moves them all, which takes time; the results are the same.
    """
    if place == "device":
        return copy.deepcopy(model).requires_grad_(False).eval()
    # The blocks' parameters are copied to the host at once: the device never holds a second set.
    on_host = {
        id(p): nn.Parameter(_host_copy(p.detach()), requires_grad=False) for p in model.decoder.blocks.parameters()
    }
    found = copy.deepcopy(model, on_host).requires_grad_(False).eval()
    for block in found.decoder.blocks:
        _fetch_for_forward(block, model.device)
    return found


def _host_copy(tensor: Tensor) -> Tensor:
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return found.copy_(tensor)


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
    """A Medusa model whose base is trained too: its loss is L_lm + heads_loss_weight * the heads' loss.

    L_lm is the base model's own loss; with a `reference` the mean of KL(reference || base) over the same targets.
    """

    def __init__(self, medusa: MedusaModel, reference: CausalLM | None = None) -> None:
        """Makes the base model's parameters trainable; the reference is no submodule, and its parameters are not
        trained."""
        super().__init__()
        self.medusa = medusa
        self._reference = (reference,)  # in a tuple: not registered as a submodule
        medusa.base.requires_grad_()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        heads_loss_weight: Tensor | float = 1.0,
        num_items_in_batch: Tensor | None = None,
        **loss_options: Any,
    ) -> MedusaOutput:
        """Arguments and errors are those of `MedusaModel.forward`; `base_loss` is L_lm.

        With a reference, options of the cross entropy, such as `token_weights`, are for the heads alone.
        `num_items_in_batch`: long (K + 1,), the base model's first, as of `num_targets`; or one for all.
        """
        as_forward(self.medusa, "joint_loss")
        return self.medusa.joint_loss(
            input_ids,
            labels=labels,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            inputs_embeds=inputs_embeds,
            heads_loss_weight=heads_loss_weight,
            num_items_in_batch=num_items_in_batch,
            reference=self._reference[0],
            **loss_options,
        )

    def num_targets(
        self, labels: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Long (K + 1,): targets of the base model, then of each head."""
        return self.medusa.num_targets(labels, position_ids, cu_seqlens, first=1)
