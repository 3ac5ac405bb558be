"""Kimi Delta Attention (Kimi Team, 2025, https://arxiv.org/abs/2510.26692): Gated DeltaNet with a decay for each key
channel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import TensorView, WeightMapping, rename, rows
from ligermodels.errors import InputError
from ligermodels.layers.config_checks import check_numbers, check_sizes
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.gated_delta_net import Decay, GatedDeltaNet, GatedDeltaNetConfig
from ligermodels.layers.linear import Linear
from ligermodels.layers.sharding import TensorSharding, local, own_part_of_each
from ligermodels.ops.runtime.dispatch import use_kernels


@dataclass(frozen=True)
class KimiDeltaAttentionConfig(GatedDeltaNetConfig):
    """Config of a Kimi Delta Attention layer: the fields of `GatedDeltaNetConfig`; `backend` is not "fla".

    `gate_rank` is the number of channels from which the decays, and also the output gate, are projected; None to
    project both from the hidden states (Ling 3.0). With a `decay_bound` below 0, the logarithms of the decays stay
    above it: see `ops.delta_gates`.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        **{f"delta.{part}": f"self_attn.{part}_proj" for part in "qkvb"},
        "delta.decay_a": "self_attn.f_a_proj",
        "delta.decay_b": "self_attn.f_b_proj",
        "delta.z_a": "self_attn.g_a_proj",
        "delta.z_b": "self_attn.g_b_proj",
        "delta.a": "self_attn.f_proj",
        "delta.z": "self_attn.g_proj",
        "delta.conv": "self_attn.conv1d",
        "delta.A_log": "self_attn.A_log",
        "delta.dt_bias": "self_attn.dt_bias",
        "delta.norm": "self_attn.o_norm",
        "delta.out": "self_attn.o_proj",
    }
    HEADS_FIELD: ClassVar[str] = "num_key_heads (linear_num_heads, or num_heads in linear_attn_config)"

    OUTPUT_GATE: ClassVar[str] = "sigmoid"

    gate_rank: int | None = None
    decay_bound: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "gate_rank")
        check_numbers(self, "decay_bound", negative=True)

    def build(self, hidden_size: int) -> nn.Module:
        return KimiDeltaAttention(hidden_size, self)

    def build_decay(self) -> ChannelDecay:
        return ChannelDecay(self.num_value_heads, self.key_head_dim, self.beta_scale, self.decay_bound)

    @property
    def num_decays(self) -> int:
        """Number of key channels of all value heads."""
        return self.num_value_heads * self.key_head_dim

    @property
    def projected(self) -> dict[str, int]:
        qkv = dict(zip("qkv", self.conv_parts, strict=True))
        if self.gate_rank is not None:
            return {**qkv, "b": self.num_value_heads}
        return {**qkv, "z": self.value_size, "b": self.num_value_heads, "a": self.num_decays}

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """Mappings of the layer's tensors: each projection is a tensor of its own. For the convolution see
        `GatedDeltaNetConfig.weight_mappings`. If `names` has "delta.A_log_of_4d", A_log is (1, 1, heads, 1).

        Args:
            hidden_size: channels of the hidden states.
            native: prefix of the native tensors.
            checkpoint: prefix of the checkpoint tensors.
            names: part -> name in this family.
        """
        sources = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        mappings = super().weight_mappings(hidden_size, native, checkpoint, names)
        if "delta.A_log_of_4d" in sources:
            target = f"{native}.decay.log_rate"
            mappings = [mapping for mapping in mappings if mapping.target != target]
            view = TensorView(sources["delta.A_log_of_4d"], _of_four_dimensions)
            mappings.append(WeightMapping(target, (view,)))
        if (rank := self.gate_rank) is None:
            return mappings
        low = [("decay_a", 0), ("z_a", rank)]
        pieces = ((f"{sources[f'delta.{part}']}.weight", 0, start, rank) for part, start in low)
        return [
            *mappings,
            rows(f"{native}.low_rank.weight", pieces),
            *(rename(f"{native}.{part}.weight", f"{sources[f'delta.{part}']}.weight") for part in ("decay_b", "z_b")),
        ]

    def info(self) -> dict[str, Any]:
        return super().info() | ({} if self.gate_rank is None else {"gate_rank": self.gate_rank})


class KimiDeltaAttention(GatedDeltaNet):
    """The gated delta rule with a decay for each key channel, over convolved queries, keys and values. Its output is
    normalised, and multiplied by the sigmoid of a gate.

    The rows of `in_proj` are q, k, v and b (how far the state moves to a value). `low_rank` projects to the inputs of
    `decay_b`, for the decays, then of `z_b`, for the output gate. Without a `gate_rank` there are none of these three,
    and the rows of `in_proj` are those of `GatedDeltaNet`, with a row of a for each decay.
    """

    config: KimiDeltaAttentionConfig
    float8_linears: ClassVar[Mapping[str, str | None]] = {
        **{"in_proj": INPUT, "low_rank": INPUT},
        **{"decay_b": None, "z_b": None, "out": None},
    }
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {
        **{"in_proj": "columns_to_all", "low_rank": "replicated"},
        **{"decay_b": "columns", "z_b": "columns", "out": "rows"},
    }

    def __init__(self, hidden_size: int, config: KimiDeltaAttentionConfig) -> None:
        super().__init__(hidden_size, config)
        if (rank := config.gate_rank) is not None:
            self.low_rank = Linear(hidden_size, 2 * rank, bias=False)
            self.decay_b = Linear(rank, config.num_decays, bias=False)
            self.z_b = Linear(rank, config.value_size, bias=False)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As in `GatedDeltaNet`, with g (B, T, R, K)."""
        config = self.config
        if torch.compiler.is_exporting() and isinstance(x.shape[1], torch.SymInt) and not use_kernels(x):
            raise InputError(
                "input_ids: Kimi Delta Attention loops over tokens in torch ops where it has no kernels (on a CPU, in "
                "float64), so torch.export needs a fixed length there; the batch may be dynamic"
            )
        if config.gate_rank is None:
            return super()._project(x)
        parts = list(config.projected.values())
        projected = own_part_of_each(self, self.in_proj(x), parts)
        heads = config.num_value_heads * projected.shape[-1] // sum(parts)
        inputs, b = projected.split([projected.shape[-1] - heads, heads], dim=-1)
        decays, z = self.low_rank(x).chunk(2, dim=-1)
        g, beta = self.decay(self.decay_b(decays), b)
        return inputs, self.z_b(z).unflatten(-1, (heads, -1)), g, beta


class ChannelDecay(Decay):
    """As `Decay`, with a bias and a decay for each of the key channels of a head, bounded by `lower_bound` if it is
    given."""

    def __init__(
        self, num_heads: int, channels: int, beta_scale: float = 1.0, lower_bound: float | None = None
    ) -> None:
        super().__init__(num_heads, beta_scale, channels)
        self.lower_bound = lower_bound

    def init_weights(self, std: float = 0.0) -> None:
        """Rates uniform in (1, 16); softplus of the biases between 0.001 and 0.1, uniform in its logarithm."""
        nn.init.uniform_(self.log_rate, 1, 16).log_()
        with torch.no_grad():
            step = nn.init.uniform_(self.bias, math.log(1e-3), math.log(1e-1)).exp_()
            step.add_(torch.log(-torch.expm1(-step)))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """a (B, T, heads * channels), b (B, T, heads) -> g (B, T, heads, channels), beta (B, T, heads), at least
        fp32."""
        log_rate, bias = local(self, self.log_rate), local(self, self.bias)
        by_head = partial(torch.unflatten, dim=-1, sizes=(len(log_rate), -1))
        g, beta = ops.delta_gates(by_head(a), b, log_rate, by_head(bias), self.lower_bound)
        return g, beta if self.beta_scale == 1 else beta * self.beta_scale


def _of_four_dimensions(log_rate: Tensor) -> Tensor:
    """(heads,) -> (1, 1, heads, 1), as checkpoints have it."""
    return log_rate[None, None, :, None]
