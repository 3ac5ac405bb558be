"""Mixture of experts: a router sends each token to a few of many feed-forward layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import (
    WeightMapping,
    experts_gate_up,
    experts_gate_up_in_one,
    experts_gate_up_transposed,
    rename,
    row,
    stack,
    transposed,
)
from ligermodels.errors import ConfigError
from ligermodels.layers.activation import ACTIVATIONS, UNGATED, GatedActivation
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.config_checks import check_choice, check_numbers, check_sizes
from ligermodels.layers.context import ForwardContext, RouterOutput
from ligermodels.layers.expert_mix import mix_experts, of_rows
from ligermodels.layers.expert_parallel import ExpertExchange, Pending
from ligermodels.layers.expert_parts import ComposedExperts
from ligermodels.layers.layer import Layer
from ligermodels.layers.linear import Linear
from ligermodels.layers.mlp import MLPConfig
from ligermodels.layers.router import RouterConfig
from ligermodels.layers.sharding import (
    TensorSharding,
    is_tensor_parallel,
    local,
    of_all_tokens,
    on_first_rank,
    own_experts,
    split_evenly,
    sum_over_ranks,
    used_in_parts,
)
from ligermodels.layers.ungated_mlp import UngatedMLPConfig
from ligermodels.ops.runtime.tensors import elementwise


@dataclass(frozen=True)
class MoEConfig(LayerConfig):
    """Config of a mixture of experts: feed-forward layers, some of them chosen for each token.

    Args:
        router: config of the router, which chooses the experts.
        size: intermediate channels of an expert.
        activation: a key of ACTIVATIONS; or a key of UNGATED for experts without a gate (Nemotron-H).
        alpha: factor of the gate: up + up_offset is multiplied by activation(alpha * gate) / alpha (gpt-oss). Default:
            1.
        limit: gate is clamped to at most `limit` (with the activation "clamped_silu" the activation, in place of gate),
            and up to [-limit, limit]. Default: None, no clamping.
        up_offset: is added to up. Default: 0.
        bias: whether the experts' projections have biases.
        latent_size: channels of the experts' inputs and outputs, if they differ from the hidden size: a linear layer
            leads into them, and another one out of them (Nemotron-H). Default: None.
        latent_bias: whether these two linear layers have biases.
        shared: a feed-forward layer for all tokens. Default: None.
        shared_gate: multiply the output of `shared` by the sigmoid of a linear layer with one output (Qwen1.5-MoE).
        weight_inputs: whether weights multiply the experts' inputs, instead of their outputs (Llama 4).
        output_scale: factor of the whole output, of the routed and the shared experts (Cohere 2 MoE).
        aux_loss: whether training may add a load-balancing loss.

    Raises:
        ConfigError: a field is out of range, or fields do not fit together; the message names the field.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "experts.router": "mlp.gate.weight",
        "experts.selection_bias": "mlp.gate.e_score_correction_bias",
        "experts.router_norm": "mlp.gate.norm.weight",
        "experts.scales": "mlp.gate.expert_scales",
        "experts.gate": "mlp.experts.{expert}.gate_proj.weight",
        "experts.up": "mlp.experts.{expert}.up_proj.weight",
        "experts.down": "mlp.experts.{expert}.down_proj.weight",
        "experts.router_bias": "mlp.gate.bias",
        "experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
        "experts.down_bias": "mlp.experts.down_proj_bias",
        "experts.latent_in": "mlp.fc1_latent_proj",
        "experts.latent_out": "mlp.fc2_latent_proj",
        "experts.shared": "mlp.shared_expert.{part}_proj",
        "experts.shared_gate": "mlp.shared_expert_gate.weight",
    }

    router: RouterConfig
    size: int
    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    bias: bool = False
    latent_size: int | None = None
    latent_bias: bool = False
    shared: MLPConfig | UngatedMLPConfig | None = None
    shared_gate: bool = False
    weight_inputs: bool = False
    output_scale: float = 1.0
    aux_loss: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, "size", "latent_size")
        check_choice(self, "activation", (*ACTIVATIONS, *UNGATED))
        check_numbers(self, "alpha", "limit", positive=True)
        if not self.gated and (self.alpha, self.limit, self.up_offset) != (1.0, None, 0.0):
            raise ConfigError(f"activation: {self.activation!r} has no gate; leave out alpha, limit and up_offset")
        if self.latent_bias and self.latent_size is None:
            raise ConfigError("latent_bias: there are no latent projections that it could be added to; set latent_size")
        if self.shared_gate and self.shared is None:
            raise ConfigError("shared_gate: there is no shared expert that it could gate; set shared")

    @property
    def gated(self) -> bool:
        """Whether the experts have a gate."""
        return self.activation in ACTIVATIONS

    @property
    def rows(self) -> int:
        """Rows of `gate_up` of each expert: pairs of gate and up, or up alone."""
        return (2 if self.gated else 1) * self.size

    @property
    def activation_options(self) -> dict[str, Any]:
        """Arguments of the activation's op."""
        multipliers = {"gate_multiplier": self.alpha, "down_multiplier": 1 / self.alpha}
        return {**multipliers, "limit": self.limit, "up_offset": self.up_offset}

    @property
    def expert_router(self) -> RouterConfig:
        return self.router

    @property
    def has_extra_output(self) -> bool:
        return True

    def build(self, hidden_size: int) -> nn.Module:
        return MoE(hidden_size, self)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """The mappings of the layer; see `LayerConfig.weight_mappings`. Biases are one tensor for all experts.

        A checkpoint has tensors for each expert, or one tensor for all experts: `names` contains "experts.gate_up" (of
        experts without a gate the name of up), for transposed matrices "experts.gate_up_transposed", or if gate and up
        alternate "experts.gate_up_pairs".
        It may have the selection bias as a matrix of one row: "experts.selection_bias_row", and gate and up of the
        shared expert in one tensor: "experts.shared_gate_up".

        Args:
            hidden_size: channels of the layer's input.
            native: name of the layer in the native model.
            checkpoint: name of the block in the checkpoint.
            names: names of parts in the checkpoint, in place of NAMES.
        """
        names = {**self.NAMES, **names}
        sources = {part: f"{checkpoint}.{name}" for part, name in names.items()}
        bias_is_row = "experts.selection_bias_row" in names
        parameters = [
            ("router.weight", "router", True),
            ("router.bias", "router_bias", self.router.bias),
            ("gate_up_bias", "gate_up_bias", self.bias),
            ("down_bias", "down_bias", self.bias),
            ("router.selection_bias", "selection_bias", self.router.selection_bias and not bias_is_row),
            ("router.norm.weight", "router_norm", self.router.norm is not None),
            ("router.expert_scales", "scales", self.router.expert_scales),
        ]
        mappings = [
            rename(f"{native}.{name}", sources[f"experts.{part}"]) for name, part, exists in parameters if exists
        ]
        if self.router.selection_bias and bias_is_row:
            mappings.append(row(f"{native}.router.selection_bias", sources["experts.selection_bias_row"]))
        kinds = ("weight", "bias") if self.latent_bias else ("weight",)
        for part in ("latent_in", "latent_out") if self.latent_size is not None else ():
            mappings += [rename(f"{native}.{part}.{kind}", f"{sources[f'experts.{part}']}.{kind}") for kind in kinds]
        if self.shared is not None:
            parts = {f"mlp.{part}": names["experts.shared"].format(part=part) for part in ("gate", "up", "down")}
            if "experts.shared_gate_up" in names:
                parts["mlp.gate_up"] = names["experts.shared_gate_up"]
            mappings += self.shared.weight_mappings(hidden_size, f"{native}.shared", checkpoint, parts)
        if self.shared_gate:
            mappings.append(rename(f"{native}.shared_gate.weight", sources["experts.shared_gate"]))
        return [*mappings, *self._expert_mappings(f"{native}.gate_up", f"{native}.down", sources)]

    def _expert_mappings(self, gate_up: str, down: str, sources: Mapping[str, str]) -> tuple[WeightMapping, ...]:
        """The mappings of the experts' weights `gate_up` and `down`; sources: name of a part -> its tensor."""
        if "experts.gate_up" in sources:
            joined = experts_gate_up_in_one if self.gated else rename
            return joined(gate_up, sources["experts.gate_up"]), rename(down, sources["experts.down"])
        if "experts.gate_up_transposed" in sources:
            turned = experts_gate_up_transposed if self.gated else transposed
            up = turned(gate_up, sources["experts.gate_up_transposed"])
            return up, transposed(down, sources["experts.down_transposed"])
        if "experts.gate_up_pairs" in sources:
            pairs = transposed(gate_up, sources["experts.gate_up_pairs"])
            return pairs, transposed(down, sources["experts.down_transposed"])
        gates, ups, downs = (
            [sources[f"experts.{part}"].format(expert=expert) for expert in range(self.router.num_experts)]
            for part in ("gate", "up", "down")
        )
        up = experts_gate_up(gate_up, gates, ups) if self.gated else stack(gate_up, ups)
        return up, stack(down, downs)

    def tensor_shard(self, ranks: int) -> MoEConfig:
        """Divides the channels of each expert."""
        shared = None if self.shared is None else self.shared.tensor_shard(ranks)
        return replace(self, size=split_evenly("size (moe_intermediate_size)", self.size, ranks), shared=shared)

    def info(self) -> dict[str, Any]:
        sizes = {"mlp_size": self.size, "experts": self.router.num_experts, "experts_per_token": self.router.top_k}
        return sizes if self.shared is None else {**sizes, "shared_expert_size": self.shared.size}


class MoE(ComposedExperts, Layer):
    """The sum over a token's experts e of weight(e) * down_e(activation(gate_e(x)) * up_e(x)), plus the shared expert.
    Experts without a gate compute down_e(activation(up_e(x))). With `weight_inputs` the experts read weight(e) * x, and
    their outputs are summed as they are.

    Modules: `router` (a `Router`), `shared` (a feed-forward layer, or None), `shared_gate` (a linear layer with one
    output or None), and `latent_in` and `latent_out` (linear layers before and after the experts, or None). Parameters:
    `gate_up` (E, 2 * size, H), with pairs of gate and up rows as in `GatedMLP`, without a gate the up rows (E, size,
    H); `down` (E, H, size); `gate_up_bias` (E, rows of `gate_up`) or None; `down_bias` (E, H) or None. Here H is
    `latent_size`, if there is one. Optional parts are `compute` (weights in 4 or 8 bits; the parameters are then None)
    and `update` (LoRA). Experts have no capacity limit, so no token is dropped.
    """

    batch_invariant: ClassVar[bool] = True
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {
        "gate_up": 1,
        "down": 2,
        "gate_up_bias": 1,
        "down_bias": "replicated",
        "shared_gate": "replicated",
        "latent_in": "replicated",
        "latent_out": "replicated",
    }
    context_parallel: ClassVar[bool] = True  # the load-balancing loss sums over ranks
    sequence_parallel: ClassVar[bool] = True
    reads_experts: ClassVar[bool] = True
    float8_linears: ClassVar[Mapping[str, str | None]] = {"latent_in": None, "latent_out": None}
    expert_parallel: ClassVar[tuple[str, ...]] = ("gate_up", "down", "gate_up_bias", "down_bias", "update")
    _expert_mesh: Any = None  # the DeviceMesh over which `parallel.expert` divides the experts

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.token_wise = not config.aux_loss  # that loss is one of all tokens
        num_experts, size = config.router.num_experts, config.latent_size or hidden_size
        self.sizes = (num_experts, config.rows, size), (num_experts, size, config.size)
        """Shapes of `gate_up` and `down`, also if `compute` keeps the weights."""
        self.router = config.router.build(hidden_size)
        self.gate_up, self.down = (nn.Parameter(torch.empty(shape)) for shape in self.sizes)
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, config.rows)) if config.bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, size)) if config.bias else None
        gated = partial(GatedActivation, config.activation, **config.activation_options)
        self.activation = gated() if config.gated else UNGATED[config.activation]
        self.latent_in = None if config.latent_size is None else Linear(hidden_size, size, bias=config.latent_bias)
        self.latent_out = None if config.latent_size is None else Linear(size, hidden_size, bias=config.latent_bias)
        self.shared = None if config.shared is None else config.shared.build(hidden_size)
        self.shared_gate = Linear(hidden_size, 1, bias=False) if config.shared_gate else None
        self.init_weights()

    def init_weights(self, std: float = 0.02) -> None:
        """The experts' weights: normal(0, std); their biases zero."""
        for weight in (self.gate_up, self.down):
            if weight is not None:
                nn.init.normal_(weight, std=std)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self, x: Tensor, context: ForwardContext | None = None, *, routed_by: Tensor | None = None
    ) -> tuple[Tensor, RouterOutput]:
        """Mix the experts' outputs.

        Args:
            x: (..., H).
            context: context of the forward pass; its `experts` replace the router's choice. Default: None.
            routed_by: (..., H), input of the router. Default: x.

        Returns:
            (..., H), dtype of x, and the router's output.
        """
        tokens = x.flatten(0, -2)
        latent = tokens if self.latent_in is None else self.latent_in(tokens)
        rows, top_k, mesh = used_in_parts(self, latent), self.config.router.top_k, self._expert_mesh
        weights_inputs = self.config.weight_inputs
        exchange = None if mesh is None or weights_inputs else ExpertExchange(rows, top_k, mesh, context)
        given_experts = () if context is None or context.experts is None else (context.experts.flatten(0, -2),)
        logits, weights, chosen = self.router(tokens if routed_by is None else routed_by.flatten(0, -2), *given_experts)
        parts = used_in_parts(self, weights), used_in_parts(self, chosen)
        mixed = self._mix_weighted(rows, *parts, context) if weights_inputs else self._mix(rows, *parts, exchange)
        shared = self._shared(tokens)
        out = sum_over_ranks(self, mixed.get() if isinstance(mixed, Pending) else mixed)
        out = out if self.latent_out is None else self.latent_out(out)
        out = (out if shared is None else out + shared).view_as(x)
        out = out if self.config.output_scale == 1 else out * self.config.output_scale
        out = out if mesh is None else out.clone()  # FSDP2 warns of modules that return views
        logits, chosen = of_all_tokens(self, logits), of_all_tokens(self, chosen)
        return out, RouterOutput(logits, top_k, chosen, self.config.aux_loss)

    def _shared(self, tokens: Tensor) -> Tensor | None:
        """The output of the shared expert, if there is one, for tokens (N, H): (N, H)."""
        if self.shared is None:
            return None
        shared = cast(Tensor, self.shared(tokens))
        return shared if self.shared_gate is None else elementwise(torch.sigmoid, self.shared_gate(tokens)) * shared

    def _mix_weighted(self, tokens: Tensor, weights: Tensor, experts: Tensor, context: ForwardContext | None) -> Tensor:
        """The sum of the chosen experts of inputs that are multiplied by their weights: a row for each token and
        expert. Arguments: see `_mix`."""
        top_k, mesh = self.config.router.top_k, self._expert_mesh
        rows = (tokens[:, None] * weights.to(tokens.dtype)[..., None]).flatten(0, 1)
        exchange = None if mesh is None else ExpertExchange(rows, 1, mesh, context)
        mixed = self._mix(rows, weights.new_ones(rows.shape[0], 1), experts.reshape(-1, 1), exchange)
        return (mixed.get() if isinstance(mixed, Pending) else mixed).unflatten(0, (-1, top_k)).sum(1)

    def _mix(
        self, tokens: Tensor, weights: Tensor, experts: Tensor, exchange: ExpertExchange | None
    ) -> Tensor | Pending:
        """The weighted sum of the chosen experts, as `mix_experts`; through the `exchange`, a sum on its way."""
        if exchange is None:
            gate_up, down, gate_up_bias = (local(self, p) for p in (self.gate_up, self.down, self.gate_up_bias))
            biases = gate_up_bias, on_first_rank(self, self.down_bias)
            return mix_experts(
                tokens, weights, experts, gate_up, down, self.activation, biases, self.product,
                self.config.router.num_experts, self.mix,
            )  # fmt: skip
        parameters = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        if is_tensor_parallel(self):
            gate_up, down, gate_up_bias = (local(self, p) for p in parameters[:3])
            down_bias = on_first_rank(self, self.down_bias)
        else:
            gate_up, down, gate_up_bias, down_bias = (own_experts(p) for p in parameters)
        compute = of_rows(gate_up, down, self.activation, (gate_up_bias, down_bias), self.product)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return exchange.sum_of(experts, weights, self.config.router.num_experts, compute)
