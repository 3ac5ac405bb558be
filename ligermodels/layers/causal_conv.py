"""The causal convolution of recurrent mixers: Gated DeltaNet, Kimi Delta Attention, Mamba2 and short convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.layers.sharding import TensorSharding, gather_last, local, own_part_of_each
from ligermodels.layers.tokens import ContextShard


class CausalConv(nn.Module):
    """Causal convolution: see `ops.causal_conv`. Tensor parallelism divides each of `parts` (channels) evenly; so does
    context parallelism, except that each group of a part with fewer `groups` than ranks is copied to several ranks."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        parts: Sequence[int],
        width: int,
        bias: bool = False,
        activation: str | None = "silu",
        groups: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.parts, self.activation, self.groups = tuple(parts), activation, tuple(groups or parts)
        self.weight = nn.Parameter(torch.empty(sum(parts), width))
        self.bias = nn.Parameter(torch.empty(sum(parts))) if bias else None

    def init_weights(self, std: float) -> None:
        """Weight normal, bias zero."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        earlier: Tensor | None,
        cu_seqlens: Tensor | None,
        tree: tuple[Tensor, Tensor] | None,
        step: bool,
        shard: ContextShard | None = None,
    ) -> Tensor:
        """Convolve.

        Args:
            x: (B, T, channels).
            earlier: inputs before x, (B, width - 1, channels), or None.
            cu_seqlens: boundaries of packed documents, or None.
            tree: parent and depth of the nodes of a tree, or None.
            step: whether this is a decode step of one token; `earlier` is then updated in place.
            shard: under context parallelism; x is then this rank's share of the channels.

        Returns:
            (B, T, channels).
        """
        weight = own_part_of_each(self, self._whole(local(self, self.weight).t()), self.parts).t()
        bias = None if self.bias is None else own_part_of_each(self, self._whole(local(self, self.bias)), self.parts)
        if shard is not None:
            weight = self._own_share(weight.t(), shard).t()
            bias = None if bias is None else self._own_share(bias, shard)
        if step and earlier is not None:
            return ops.causal_conv_step(x, weight, earlier, bias, self.activation)
        return ops.causal_conv(
            x, weight, bias, earlier=earlier, cu_seqlens=cu_seqlens, tree=tree, activation=self.activation
        )

    def _own_share(self, parameter: Tensor, shard: ContextShard) -> Tensor:
        """This rank's share of the channels of a parameter (..., channels) under context parallelism."""
        return self.shares(parameter, shard.mesh.size())[..., shard.mesh.get_local_rank(), :]

    def shares(self, x: Tensor, ranks: int) -> Tensor:
        """x (..., channels) -> (..., ranks, share): the channels of each rank under context parallelism, whose number
        of ranks `check_context_parallel` of the mixer has checked."""
        tensor_ranks = sum(self.parts) // x.shape[-1]
        parts = x.split([part // tensor_ranks for part in self.parts], dim=-1)
        shares = []
        for part, num_groups in zip(parts, self.groups, strict=True):
            copies = max(ranks * tensor_ranks // num_groups, 1)
            groups = part.unflatten(-1, (ranks // copies, 1, -1))
            shares.append(groups.expand(*groups.shape[:-2], copies, -1).flatten(-3, -2))
        return torch.cat(shares, dim=-1)

    def _whole(self, parameter: Tensor) -> Tensor:
        """This rank's shard of a parameter (..., channels), with the channels of the other ranks."""
        return gather_last(self, parameter, sum(self.parts), partial=True)


def with_input_channel(weight: Tensor) -> Tensor:
    """As nn.Conv1d of one input channel a group has it: (channels, width) -> (channels, 1, width)."""
    return weight.unsqueeze(1)
