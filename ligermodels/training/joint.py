"""Stage 2: a model and its heads, trained together."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ligermodels.archs.medusa import MedusaModel, MedusaOutput
from ligermodels.model import CausalLM


def frozen_copy(model: CausalLM, place: Literal["device", "host"] = "device") -> CausalLM:
    """`model` as it is now, which is to stay so: the reference.

    Args:
        place: "device", beside the model; or "host", where its blocks stay in the host's memory and each is on the
            device only while it computes. Every pass then moves them all, which takes time; the results are the same.
    """
    if place == "device":
        return copy.deepcopy(model).requires_grad_(False).eval()
    # The blocks' parameters are copied to the host at once: the device never holds a second set.
    on_host = {id(p): nn.Parameter(_host_copy(p.detach()), requires_grad=False) for p in model.blocks.parameters()}
    found = copy.deepcopy(model, on_host).requires_grad_(False).eval()
    for block in found.blocks:
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


class Joint:
    """What the loop trains in stage 2: `medusa`, whose base has its own loss then, or the divergence from `reference`.

    `heads_scale`, the heads' weight, comes with each call: `train(loss_options=...)`.
    """

    def __init__(self, medusa: MedusaModel, reference: CausalLM | None = None) -> None:
        """Let the base learn."""
        self._medusa, self._reference = medusa, reference
        medusa.base.requires_grad_()

    def __call__(self, *args: Any, **options: Any) -> MedusaOutput:
        """As `MedusaModel.forward`."""
        found: MedusaOutput = self._medusa(*args, base_loss=True, reference=self._reference, **options)
        return found

    def num_targets(
        self, labels: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Long (K + 1,): of the base model, then of each head."""
        return self._medusa.num_targets(labels, position_ids, cu_seqlens, base_loss=True)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The base's, and the heads'."""
        return self._medusa.parameters()

    def train(self, mode: bool = True) -> MedusaModel:
        """As `nn.Module.train`."""
        return self._medusa.train(mode)
