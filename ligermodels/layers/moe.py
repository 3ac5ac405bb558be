"""Mixture of experts: a router sends each token to a few of many gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.attention import Context
from ligermodels.layers.mlp import ACTIVATIONS


@dataclass(frozen=True)
class MoEConfig:
    """`num_experts` gated feed-forward layers of `size` intermediate channels, of which a token meets `top_k`.

    `normalize`: the probabilities of the chosen experts are divided by their sum. `activation`: a key of ACTIVATIONS.
    Raises ConfigError when they do not fit together.
    """

    num_experts: int
    top_k: int
    size: int
    activation: str = "silu"
    normalize: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"top_k: must lie in [1, {self.num_experts}], the number of experts; got {self.top_k}")

    def build(self, hidden_size: int) -> nn.Module:
        """The layer, on hidden states of `hidden_size` channels."""
        return MoE(hidden_size, self)


class MoE(nn.Module):
    """Sum over the top_k experts e of p(e) * down_e(activation(gate_e(x)) * up_e(x)), with p = softmax(router(x)).

    Parameters: `router.weight` (E, H), `gate_up` (E, 2 * size, H) with each expert's gate rows, then its up rows, and
    `down` (E, H, size). Routing as in Mixtral (Jiang et al., 2024): softmax in float32 over all experts, then the
    choice. No expert has a capacity, so no token is dropped.
    """

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(hidden_size, config.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.size, hidden_size))
        self.down = nn.Parameter(torch.empty(config.num_experts, hidden_size, config.size))
        self.activation = ACTIVATIONS[config.activation]
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Fresh weights: normal(0, std)."""
        for weight in (self.router.weight, self.gate_up, self.down):
            nn.init.normal_(weight, std=std)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """x (..., H) -> (..., H), same dtype; the router's logits (tokens, E) are added to the context's."""
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        if context is not None:
            context.router_logits.append(logits)
        weights, experts = self.route(logits)
        order, inverse, offsets = ops.sort_by_expert(experts, self.config.num_experts)
        rows = ops.gather_rows(tokens, order, inverse, copies=self.config.top_k)
        rows = self.activation(ops.grouped_mm(rows, self.gate_up, offsets))
        rows = ops.gather_rows(ops.grouped_mm(rows, self.down, offsets), inverse, order)
        # The weights are float32, so the products and their sum are, and the result is rounded once.
        out = (rows.unflatten(0, weights.shape) * weights[..., None]).sum(1)
        return out.to(rows.dtype).view_as(x)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits (N, E) -> weights (N, top_k), at least float32, and experts, long (N, top_k), the likeliest first."""
        weights, experts = _probabilities(logits).topk(self.config.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True) if self.config.normalize else weights, experts


def load_balancing_loss(
    router_logits: Sequence[Tensor], num_experts: int, top_k: int, mask: Tensor | None = None
) -> Tensor:
    """Auxiliary loss that is least, top_k, when all experts are chosen alike (Fedus et al., 2021, equations 4 to 6).

    num_experts * sum over experts of (choices a token) * (mean probability), both over the tokens of all layers.

    Args:
        router_logits: for each layer (N, E), as `Context.router_logits` has them.
        num_experts: E.
        top_k: experts a token is sent to.
        mask: bool, N elements in any shape; False for tokens that do not count, such as padding.

    Returns a float32 scalar; it is zero when the mask lets no token through. The gradient is that of the probabilities.
    Raises InputError when there are no layers, or shapes do not fit.
    """
    if not router_logits:
        raise InputError("router_logits: empty; the load-balancing loss needs a layer with experts")
    if any(logits.shape != (router_logits[0].shape[0], num_experts) for logits in router_logits):
        shapes = [tuple(logits.shape) for logits in router_logits]
        raise InputError(f"router_logits: must all be (N, {num_experts}) with the same N, got {shapes}")
    tokens = router_logits[0].shape[0]
    if mask is not None and mask.numel() != tokens:
        raise InputError(f"mask: must have one element for each of {tokens} tokens, got shape {tuple(mask.shape)}")
    counts = router_logits[0].new_ones(tokens, 1) if mask is None else mask.reshape(-1, 1)
    counts = counts.to(torch.promote_types(router_logits[0].dtype, torch.float32))
    total = (counts.sum() * len(router_logits)).clamp(min=1)
    choices, chances = [], []
    for logits in router_logits:
        probabilities = _probabilities(logits)
        chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k, dim=-1).indices, 1)
        choices.append((chosen * counts).sum(0))
        chances.append((probabilities * counts).sum(0))
    return num_experts * (sum(choices) / total * (sum(chances) / total)).sum()


def _probabilities(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
