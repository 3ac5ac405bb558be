"""Feed-forward layer without a gate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.layers.activation import squared_relu
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.config_checks import check_choice, check_sizes
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.layer import Layer
from ligermodels.layers.linear import Linear
from ligermodels.layers.sharding import TensorSharding, local, split_evenly


@dataclass(frozen=True)
class UngatedMLPConfig(LayerConfig):
    """`size` intermediate channels, whether there are biases, and the activation: the squared ReLU, or `Xielu`."""

    NAMES: ClassVar[Mapping[str, str]] = {
        **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("up", "down")},
        "mlp.activation": "mlp.act_fn",
    }

    size: int
    bias: bool = False
    activation: Literal["relu2", "xielu"] = "relu2"

    def __post_init__(self) -> None:
        check_sizes(self, "size")
        check_choice(self, "activation", ("relu2", "xielu"))

    def build(self, hidden_size: int) -> nn.Module:
        return UngatedMLP(hidden_size, self)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        sources = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        kinds = ("weight", "bias") if self.bias else ("weight",)
        parts = [(part, kind) for kind in kinds for part in ("up", "down")]
        parts += [("activation", name) for name in Xielu.NUMBERS] if self.activation == "xielu" else []
        return [rename(f"{native}.{part}.{name}", f"{sources[f'mlp.{part}']}.{name}") for part, name in parts]

    def tensor_shard(self, ranks: int) -> UngatedMLPConfig:
        return replace(self, size=split_evenly("size (intermediate_size)", self.size, ranks))

    def info(self) -> dict[str, Any]:
        return {"mlp_size": self.size}


class Xielu(nn.Module):
    """xIELU (Huang, 2024, https://arxiv.org/abs/2411.13010): a trained quadratic above 0, a trained exponential below.

    Parameters `alpha_p` and `alpha_n` (1,); buffers `beta` and `eps` (), stored in checkpoints as in transformers.
    """

    NUMBERS: ClassVar[tuple[str, ...]] = ("alpha_p", "alpha_n", "beta", "eps")
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"alpha_p": "replicated", "alpha_n": "replicated"}
    beta: Tensor
    eps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.register_buffer("beta", torch.empty(()))
        self.register_buffer("eps", torch.empty(()))
        self.init_weights()

    def init_weights(self, std: float = 0.0) -> None:
        """The slopes of the paper: 0.8 on either side."""
        beta, alpha = 0.5, 0.8
        nn.init.constant_(self.beta, beta)
        nn.init.constant_(self.eps, -1e-6)
        nn.init.constant_(self.alpha_p, math.log(math.expm1(alpha)))
        nn.init.constant_(self.alpha_n, math.log(math.expm1(alpha - beta)))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., I), of the dtype of x; computed in float32 (of float64 in float64)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        alphas = (local(self, alpha, partial=True) for alpha in (self.alpha_p, self.alpha_n))
        alpha_p, alpha_n = (F.softplus(alpha.to(dtype)) for alpha in alphas)
        wide, beta, eps = x.to(dtype), self.beta.to(dtype), self.eps.to(dtype)
        below = (torch.expm1(torch.minimum(wide, eps)) - wide) * (beta + alpha_n)
        return (torch.where(wide > 0, alpha_p * wide * wide, below) + beta * wide).to(x.dtype)


class UngatedMLP(Layer):
    """down(activation(up(x))), by default relu(...) ** 2 (So et al., 2021, https://arxiv.org/abs/2109.08668)."""

    token_wise = True
    batch_invariant: ClassVar[bool] = True
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"up": "columns", "down": "rows"}
    float8_linears: ClassVar[Mapping[str, str | None]] = {"up": INPUT, "down": None}

    def __init__(self, hidden_size: int, config: UngatedMLPConfig) -> None:
        super().__init__()
        self.up = Linear(hidden_size, config.size, bias=config.bias)
        self.down = Linear(config.size, hidden_size, bias=config.bias)
        self.activation = Xielu() if config.activation == "xielu" else None

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:
        """x (..., H) -> (..., H)."""
        y = self.up(x)
        return cast(Tensor, self.down(squared_relu(y) if self.activation is None else self.activation(y)))
