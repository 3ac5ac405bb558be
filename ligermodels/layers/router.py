"""Router of a mixture of experts: chooses the experts of each token, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import ConfigError
from ligermodels.layers.config_checks import check_choice, check_numbers, check_sizes
from ligermodels.layers.keeps_dtype import FullPrecision, at_least_float32, keeping
from ligermodels.layers.norm import NormConfig
from ligermodels.layers.sharding import TensorSharding, local
from ligermodels.ops import RouterOptions
from ligermodels.ops.runtime.tensors import without_autocast

ROUTING_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64)
"""Dtypes of experts that a caller gives."""


@dataclass(frozen=True)
class RouterConfig:
    """Sends each token to the experts with the highest scores.

    Args:
        num_experts: number of experts.
        top_k: experts per token.
        scores: "softmax" over all experts (Mixtral, Jiang et al., 2024), or the "sigmoid" of each logit (DeepSeek-V3,
            2024, https://arxiv.org/abs/2412.19437, section 2.1.2).
        selection_bias: whether each expert has a bias that counts for the choice but not for the weight. It has no
            gradient, and stays at least float32 when the model is cast.
        num_groups: number of groups of adjacent experts.
        top_k_groups: groups per token; its experts are chosen from these.
        scores_per_group: the score of a group is the sum of this many of its highest scores: 2, or 1 (DeepSeek-V2).
        normalize: whether the weights of a token's experts are divided by their sum plus `eps`.
        eps: see `normalize`.
        min_sum: the sum of `normalize` counts as at least this number (ERNIE 4.5).
        scale: factor of the weights, after normalisation.
        float32_logits: whether logits are computed in float32 in models of any dtype, also under autocast.
        float32_weight: whether the parameters stay at least float32 when the model is loaded in, or cast to, a narrower
            dtype, as in transformers' DeepSeek-V3. Needs `float32_logits`.
        bias: whether logits have a bias. Normalised softmax scores equal the softmax over the logits of the chosen
            experts (gpt-oss).
        norm: norm of the tokens before the logits, or None.
        input_scale: factor of the tokens after `norm`.
        expert_scales: whether each expert has a trained factor of its weight, applied at the end (Gemma 4).

    Raises:
        ConfigError: fields do not fit together; the message names the field.
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    scores_per_group: int = 2
    normalize: bool = True
    eps: float = 0.0
    min_sum: float = 0.0
    scale: float = 1.0
    float32_logits: bool = False
    float32_weight: bool = False
    bias: bool = False
    norm: NormConfig | None = None
    input_scale: float = 1.0
    expert_scales: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "num_experts", "top_k", "num_groups", "top_k_groups", "scores_per_group")
        check_choice(self, "scores", ("softmax", "sigmoid"))
        check_numbers(self, "eps", "min_sum")
        if self.float32_weight and not self.float32_logits:
            raise ConfigError("float32_weight: needs logits in float32; set float32_logits")
        if self.num_experts % self.num_groups:
            raise ConfigError(f"num_groups: {self.num_groups} does not divide num_experts {self.num_experts}")
        if not 1 <= self.top_k_groups <= self.num_groups:
            raise ConfigError(
                f"top_k_groups: must lie in [1, {self.num_groups}], the number of groups; got {self.top_k_groups}"
            )
        size = self.num_experts // self.num_groups
        if self.num_groups > self.top_k_groups and size < self.scores_per_group:
            least = self.scores_per_group
            raise ConfigError(f"num_groups: groups need {least} experts or more, but {self.num_groups} have {size}")
        if not 1 <= self.top_k <= self.top_k_groups * size:
            raise ConfigError(
                f"top_k: must lie in [1, {self.top_k_groups * size}], the number of experts that a token can be sent "
                f"to; got {self.top_k}"
            )

    def build(self, hidden_size: int) -> Router:
        """The router for tokens with `hidden_size` channels."""
        return (FullPrecisionRouter if self.float32_weight else Router)(hidden_size, self)

    @property
    def options(self) -> RouterOptions:
        """The options of `ops.route_tokens`."""
        return RouterOptions(
            self.top_k, self.scores, self.num_groups, self.top_k_groups, self.scores_per_group, self.normalize,
            self.eps, self.min_sum, self.scale,
        )  # fmt: skip


class Routing(NamedTuple):
    """Result of a router: `logits` (N, E); `weights` (N, top_k), at least float32; and `experts`, long (N, top_k), in
    order of falling scores, or in the order in which they were given."""

    logits: Tensor
    weights: Tensor
    experts: Tensor


class Router(nn.Module):
    """Chooses experts by scores softmax(weight @ x + bias) or sigmoid(weight @ x + bias): see `RouterConfig`.

    Parameters are `weight` (E, H) and, if configured, `bias` (E,) and `expert_scales` (E,). The buffer
    `selection_bias` (E,) is float32, or None. The router does not synchronise with the device, and shapes do not depend
    on values.
    """

    selection_bias: Tensor | None
    trained_buffers: tuple[str, ...] = ()
    """Names of buffers that training changes: checkpoints of a run hold them."""
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {
        "weight": "replicated",
        "bias": "replicated",
        "expert_scales": "replicated",
    }

    def __init__(self, hidden_size: int, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.bias else None
        self.norm = None if config.norm is None else config.norm.build(hidden_size)
        self.expert_scales = nn.Parameter(torch.empty(config.num_experts)) if config.expert_scales else None
        # A buffer, as in transformers: `requires_grad_` and optimizers leave it alone, and FSDP2 does not shard it.
        self.register_buffer("selection_bias", None)
        if config.selection_bias:
            self.selection_bias = torch.empty(config.num_experts, dtype=torch.float32)
        self.init_weights()

    def init_weights(self, std: float = 0.02) -> None:
        """Fill weight and bias from normal(0, std), the selection bias with zero, and `expert_scales` with one."""
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.normal_(parameter, std=std)
        if self.expert_scales is not None:
            nn.init.ones_(self.expert_scales)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        selection_bias = self.selection_bias  # before it is cast
        super()._apply(fn, recurse)
        if selection_bias is not None:
            self.selection_bias = keeping(fn, at_least_float32)(selection_bias)
        return self

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.config}"

    def forward(self, tokens: Tensor, given_experts: Tensor | None = None) -> Routing:
        """Choose the experts of each token, and compute their weights.

        Args:
            tokens: (N, H).
            given_experts: (N, top_k), any integer dtype: experts to use in place of the router's choice, in this order.
                Their weights are computed as for chosen experts. A token with `ops.NOT_ROUTED` (-1) keeps the
                router's choice. Default: None.

        Returns:
            The logits, and the experts and weights of each token.
        """
        config = self.config
        weight, bias, expert_scales = (local(self, p) for p in (self.weight, self.bias, self.expert_scales))
        tokens = tokens if self.norm is None else self.norm(tokens)
        tokens = tokens if config.input_scale == 1.0 else tokens * config.input_scale
        if config.float32_logits:
            with without_autocast(tokens):
                wide = torch.promote_types(tokens.dtype, torch.float32)
                bias = None if bias is None else bias.to(wide)
                logits = ops.dense_linear(tokens.to(wide), weight.to(wide), bias)
        else:
            logits = ops.dense_linear(tokens, weight, bias)
        weights, experts = ops.route_tokens(logits, self.selection_bias, given_experts, options=config.options)
        return Routing(logits, weights if expert_scales is None else weights * expert_scales[experts], experts)


class FullPrecisionRouter(FullPrecision, Router):
    """A `Router` whose parameters stay float32 in a model of a narrower dtype: `RouterConfig.float32_weight`. Rounded
    weights choose other experts where scores are close."""
