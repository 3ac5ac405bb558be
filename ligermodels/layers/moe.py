"""Mixture of experts: a router sends each token to a few of many gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import WeightMapping, experts_gate_up, experts_gate_up_in_one, rename, stack
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.context import ForwardContext, RouterOutput
from ligermodels.layers.mlp import GatedActivation


@dataclass(frozen=True)
class MoEConfig(LayerConfig):
    """`num_experts` gated feed-forward layers of `size` intermediate channels, of which a token meets `top_k`.

    `normalize`: the probabilities of the chosen experts are divided by their sum. `activation`: a key of ACTIVATIONS.
    Raises ConfigError when they do not fit together.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "experts.router": "mlp.gate.weight",
        "experts.gate": "mlp.experts.{expert}.gate_proj.weight",
        "experts.up": "mlp.experts.{expert}.up_proj.weight",
        "experts.down": "mlp.experts.{expert}.down_proj.weight",
    }

    num_experts: int
    top_k: int
    size: int
    activation: str = "silu"
    normalize: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(f"top_k: must lie in [1, {self.num_experts}], the number of experts; got {self.top_k}")

    def build(self, hidden_size: int) -> nn.Module:
        return MoE(hidden_size, self)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """Each expert's tensors by themselves, or one for all experts, where `names` has an "experts.gate_up"."""
        there = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        router = rename(f"{native}.router.weight", there["experts.router"])
        if "experts.gate_up" in names:
            gate_up = experts_gate_up_in_one(f"{native}.gate_up", there["experts.gate_up"])
            return [router, gate_up, rename(f"{native}.down", there["experts.down"])]
        each = {
            part: [there[f"experts.{part}"].format(expert=expert) for expert in range(self.num_experts)]
            for part in ("gate", "up", "down")
        }
        gate_up = experts_gate_up(f"{native}.gate_up", each["gate"], each["up"])
        return [router, gate_up, stack(f"{native}.down", each["down"])]

    def info(self) -> dict[str, Any]:
        return {"mlp_size": self.size, "experts": self.num_experts, "experts_per_token": self.top_k}


class MoE(nn.Module):
    """Sum over the top_k experts e of p(e) * down_e(activation(gate_e(x)) * up_e(x)), with p = softmax(router(x)).

    Parameters: `router.weight` (E, H), `gate_up` (E, 2 * size, H) with each expert's gate and up rows in pairs, as in
    `GatedMLP`, and `down` (E, H, size). Routing as in Mixtral (Jiang et al., 2024): softmax in float32 over all
    experts, then the choice. No expert has a capacity, so no token is dropped.
    """

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(hidden_size, config.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.size, hidden_size))
        self.down = nn.Parameter(torch.empty(config.num_experts, hidden_size, config.size))
        self.activation = GatedActivation(config.activation)
        self.init_weights()

    def init_weights(self, std: float = 0.02) -> None:
        """The experts' weights: normal(0, std)."""
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=std)

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> tuple[Tensor, RouterOutput]:
        """x (..., H) -> (..., H), same dtype, and the router's output."""
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        out = mix_experts(tokens, *self.route(logits), self.gate_up, self.down, self.activation)
        return out.view_as(x), RouterOutput(logits, self.config.top_k)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits (N, E) -> weights (N, top_k), at least float32, and experts, long (N, top_k), the likeliest first."""
        weights, experts = _probabilities(logits).topk(self.config.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True) if self.config.normalize else weights, experts


def mix_experts(
    tokens: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The weighted sum of down_e(activation(gate_up_e(x))) over the chosen experts e of each token x.

    Args:
        tokens: (N, H).
        weights, experts: (N, top_k), `experts` long in [0, E).
        gate_up, down: (E, 2 * size, H) and (E, H, size).
        activation: (R, 2 * size) -> (R, size).

    Returns (N, H) of the dtype that the experts compute in.
    """
    order, inverse, offsets = ops.sort_by_expert(experts, len(gate_up))
    rows = ops.gather_rows(tokens, order, inverse, copies=experts.shape[1])
    rows = activation(ops.grouped_mm(rows, gate_up, offsets))
    rows = ops.gather_rows(ops.grouped_mm(rows, down, offsets), inverse, order)
    # In float32 the products and their sum are rounded once, at the end.
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    return (rows.unflatten(0, weights.shape) * weights[..., None]).sum(1).to(rows.dtype)


def load_balancing_loss(router_outputs: Sequence[RouterOutput], mask: Tensor | None = None) -> Tensor:
    """Auxiliary loss that is least, top_k, when all experts are chosen alike (Fedus et al., 2021, equations 4 to 6).

    num_experts * sum over experts of (choices a token) * (mean probability), both over the tokens of all layers.

    Args:
        router_outputs: those of each layer, as `Decoder.forward` gives them.
        mask: bool, as many elements as tokens, in any shape; False for tokens that do not count, such as padding.

    Returns a float32 scalar; it is zero when the mask lets no token through. The gradient is that of the probabilities.
    Raises InputError when there are no layers, or shapes do not fit.
    """
    if not router_outputs:
        raise InputError("router_outputs: empty; the load-balancing loss needs a layer with experts")
    first, top_k = router_outputs[0]
    if any(logits.shape != first.shape or k != top_k for logits, k in router_outputs):
        shapes = [(tuple(logits.shape), k) for logits, k in router_outputs]
        raise InputError(f"router_outputs: all layers must have the same (tokens, experts) and top_k, got {shapes}")
    tokens, num_experts = first.shape
    if mask is not None and mask.numel() != tokens:
        raise InputError(f"mask: must have one element for each of {tokens} tokens, got shape {tuple(mask.shape)}")
    counts = first.new_ones(tokens, 1) if mask is None else mask.reshape(-1, 1)
    counts = counts.to(torch.promote_types(first.dtype, torch.float32))
    total = (counts.sum() * len(router_outputs)).clamp(min=1)
    choices, chances = [], []
    for logits, _ in router_outputs:
        probabilities = _probabilities(logits)
        chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k, dim=-1).indices, 1)
        choices.append((chosen * counts).sum(0))
        chances.append((probabilities * counts).sum(0))
    return num_experts * (sum(choices) / total * (sum(chances) / total)).sum()


def _probabilities(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
