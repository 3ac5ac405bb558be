"""Mamba2 (Dao and Gu, 2024, https://arxiv.org/abs/2405.21060), as in Bamba, Granite 4, Nemotron-H and
Falcon-H1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import TensorView, WeightMapping, rename
from ligermodels.errors import ConfigError
from ligermodels.layers.causal_conv import CausalConv, with_input_channel
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.config_checks import check_multiple, check_numbers, check_sizes
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.delta_state import DeltaState, LayerDelta
from ligermodels.layers.external_states import RecurrentLayer
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.keeps_dtype import FullPrecision
from ligermodels.layers.linear import Linear
from ligermodels.layers.sharding import TensorSharding, local, own_part_of_each, split_evenly


@dataclass(frozen=True)
class Mamba2Config(LayerConfig):
    """Config of a Mamba2 layer. Head j uses group j // (num_heads / num_groups) of B and C.

    Args:
        num_heads: number of heads.
        head_dim: channels of a head.
        state_size: channels of B and C of a group, N.
        num_groups: groups of B and C, and of the output's norm.
        conv_width: number of tokens in the convolution, the current token included.
        conv_bias: whether the convolution has a bias.
        bias: whether the input projection has a bias.
        out_bias: whether the output projection has a bias.
        time_step_limit: smallest and largest step size, after softplus.
        norm_eps: epsilon of the output's norm.
        norm_before_gate: whether the output is normalised before it is multiplied by the gate, instead of after it.
        has_norm: whether the output is normalised at all, or only multiplied by the gate (Falcon-H1).
        part_scales: factors of the gate z, of x, B and C, and of the step sizes dt, bias included (Falcon-H1).
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "mamba.in": "mamba.in_proj",
        "mamba.conv": "mamba.conv1d",
        "mamba.A_log": "mamba.A_log",
        "mamba.dt_bias": "mamba.dt_bias",
        "mamba.D": "mamba.D",
        "mamba.norm": "mamba.norm",
        "mamba.out": "mamba.out_proj",
    }

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    norm_eps: float = 1e-5
    norm_before_gate: bool = False
    has_norm: bool = True
    part_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "head_dim", "state_size", "num_groups", "conv_width")
        check_multiple(self, "num_heads", "num_groups")
        check_numbers(self, "norm_eps")
        low, high = self.time_step_limit
        if not 0 <= low <= high:
            raise ConfigError(f"time_step_limit: must be two numbers, 0 <= low <= high; got {self.time_step_limit}")

    def build(self, hidden_size: int) -> nn.Module:
        return Mamba2(hidden_size, self)

    @property
    def inner_size(self) -> int:
        """Channels of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Channels of x, B and C."""
        of_groups = self.num_groups * self.state_size
        return self.inner_size, of_groups, of_groups

    @property
    def conv_groups(self) -> tuple[int, int, int]:
        """Heads of x, and groups of B and C."""
        return self.num_heads, self.num_groups, self.num_groups

    def new_state(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DeltaState:
        matrix = self.num_heads, self.state_size, self.head_dim
        conv_inputs = self.conv_width - 1, sum(self.conv_parts)
        return DeltaState(num_layers, batch_size, conv_inputs, matrix, dtype=dtype, device=device)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        sources = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        conv = TensorView(f"{sources['mamba.conv']}.weight", with_input_channel)
        found = [
            WeightMapping(f"{native}.conv.weight", (conv,)),
            rename(f"{native}.steps.log_rate", sources["mamba.A_log"]),
            rename(f"{native}.steps.bias", sources["mamba.dt_bias"]),
            rename(f"{native}.steps.skip", sources["mamba.D"]),
        ]
        if self.has_norm:
            found.append(rename(f"{native}.norm.weight", f"{sources['mamba.norm']}.weight"))
        if self.conv_bias:
            found.append(rename(f"{native}.conv.bias", f"{sources['mamba.conv']}.bias"))
        for native_name, part, bias in (("in_proj", "in", self.bias), ("out", "out", self.out_bias)):
            for kind in ("weight", "bias") if bias else ("weight",):
                found.append(rename(f"{native}.{native_name}.{kind}", f"{sources[f'mamba.{part}']}.{kind}"))
        return found

    def tensor_shard(self, ranks: int) -> Mamba2Config:
        """Divide the groups of B and C over ranks, together with their heads."""
        groups = split_evenly("num_groups (mamba_n_groups)", self.num_groups, ranks)
        return replace(self, num_groups=groups, num_heads=self.num_heads // ranks)

    def state_elements(self, max_length: int) -> int:
        matrix = self.num_heads * self.state_size * self.head_dim
        return (self.conv_width - 1) * sum(self.conv_parts) + matrix

    def info(self) -> dict[str, Any]:
        return {
            "mamba_heads": self.num_heads,
            "mamba_head_dim": self.head_dim,
            "mamba_groups": self.num_groups,
            "mamba_state_size": self.state_size,
        }


class Mamba2(RecurrentLayer):
    """State-space duality over convolved x, B and C: see `ops.ssd`. Its output is gated and normalised.

    The rows of `in_proj` are the gate z, x, B, C and the step sizes dt, as in checkpoints. Tensor parallelism divides
    the rows evenly, regardless of these parts. Outputs are gathered, and each rank takes the channels of its groups.

    Under context parallelism each rank has some tokens for its projections, gate and norm, and convolves and runs the
    recurrence over all tokens of a share of the heads, as `GatedDeltaNet` does. Ranks whose heads have the same group
    all convolve its B and C.
    """

    float8_linears: ClassVar[Mapping[str, str | None]] = {"in_proj": INPUT, "out": None}
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"in_proj": "columns_to_all", "out": "rows"}
    sequence_parallel: ClassVar[bool] = True
    context_parallel: ClassVar[bool] = True

    def __init__(self, hidden_size: int, config: Mamba2Config) -> None:
        super().__init__()
        self.config = config
        width = config.inner_size + sum(config.conv_parts) + config.num_heads
        self.in_proj = Linear(hidden_size, width, bias=config.bias)
        self.conv = CausalConv(config.conv_parts, config.conv_width, bias=config.conv_bias, groups=config.conv_groups)
        self.steps = Steps(config.num_heads, config.time_step_limit)
        self.norm = GatedGroupNorm(config) if config.has_norm else None
        self.out = Linear(config.inner_size, hidden_size, bias=config.out_bias)

    def check_context_parallel(self, ranks: int) -> None:
        """Each rank computes whole heads, of whole groups or of one group."""
        split_evenly("num_heads (mamba_n_heads)", self.config.num_heads, ranks)
        few, many = sorted((self.config.num_groups, ranks))
        if many % few:
            raise ConfigError(
                f"num_groups (mamba_n_groups): {self.config.num_groups} groups cannot be shared among {ranks} ranks; "
                "one number must be a multiple of the other"
            )

    def mix(self, x: Tensor, context: ForwardContext, state: LayerDelta | None) -> Tensor:
        config = self.config
        parts = [config.inner_size, *config.conv_parts, config.num_heads]
        projected = own_part_of_each(self, self.in_proj(x), parts)
        ranks = sum(parts) // projected.shape[-1]  # number of ranks that groups are divided over
        inner, of_groups, _ = (part // ranks for part in config.conv_parts)
        heads = config.num_heads // ranks
        z, inputs, dt = self._scaled(projected, inner, of_groups, heads)
        dt, rates, skip = self.steps(dt)
        if context.seq_lens is not None:  # padding must not change the state
            dt = dt * (torch.arange(projected.shape[1], device=x.device) < context.seq_lens[:, None])[..., None]
        shard = context.shard
        if shard is not None:  # all tokens, of this rank's share of the heads
            shares, rank = shard.mesh.size(), shard.mesh.get_local_rank()
            inputs = shard.share_of_channels(self.conv.shares(inputs, shares))
            dt = shard.share_of_channels(dt.unflatten(-1, (shares, -1)))
            rates, skip = (of_heads.unflatten(0, (shares, -1))[rank] for of_heads in (rates, skip))
        y = self._recurrence(inputs, (dt, rates, skip), context, state).to(z.dtype).flatten(2)
        if shard is not None:
            y = shard.share_of_tokens(y).flatten(2)
        return self.out(ops.swiglu(z, y) if self.norm is None else self.norm(y, z))

    def _recurrence(
        self, inputs: Tensor, steps: tuple[Tensor, Tensor, Tensor], context: ForwardContext, state: LayerDelta | None
    ) -> Tensor:
        """The convolution and the recurrence of R heads, (B, T, R, head_dim).

        Args:
            inputs: x, B and C of these heads before the convolution, (B, T, channels).
            steps: step sizes (B, T, R), rates A and skip weights D (R,).
            context: context of the forward pass.
            state: decoding state, or None.
        """
        dt, rates, skip = steps
        inner = dt.shape[-1] * self.config.head_dim
        of_groups = (inputs.shape[-1] - inner) // 2
        one = state is not None and context.tree is None and context.seq_lens is None and inputs.shape[1] == 1
        earlier = None
        if state is not None:
            inputs, earlier = inputs.to(state.inputs.dtype), state.inputs
        tree = None if context.tree is None else (context.tree.parent, context.tree.depth)
        convolved = self.conv(inputs, earlier, context.cu_seqlens, tree, one, context.shard)
        values, b, c = convolved.split([inner, of_groups, of_groups], dim=-1)
        b, c = (tensor.unflatten(-1, (-1, self.config.state_size)) for tensor in (b, c))
        operands = values.unflatten(-1, (-1, self.config.head_dim)), dt, rates, b, c, skip
        if state is None:
            return ops.ssd(*operands, cu_seqlens=context.cu_seqlens, final_state=False)[0]
        if one:
            return ops.ssd_step(*operands, state.matrix)
        if context.tree is not None:
            y, updates = ops.ssd_tree(*operands, state.matrix, context.tree.mask)
            state.branch(inputs, updates, context.tree)
            return y
        y, last = ops.ssd(*operands, initial_state=state.matrix)
        state.advance(inputs, last, context.seq_lens)
        return y

    def _scaled(self, projected: Tensor, inner: int, of_groups: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """The gate z, the inputs x, B and C of the convolution, and dt, each times its factor.

        Args:
            projected: (B, T, 2 * inner + 2 * of_groups + heads).
            inner: channels of z and of x.
            of_groups: channels of B and of C.
            heads: channels of dt.
        """
        scale_z, *scales, scale_dt = self.config.part_scales
        z, inputs, dt = projected.split([inner, inner + 2 * of_groups, heads], dim=-1)
        if any(scale != 1 for scale in scales):
            parts = zip(inputs.split([inner, of_groups, of_groups], dim=-1), scales, strict=True)
            inputs = torch.cat([part * scale for part, scale in parts], dim=-1)
        return z if scale_z == 1 else z * scale_z, inputs, dt if scale_dt == 1 else dt * scale_dt


class Steps(FullPrecision):
    """The step size of each token and head, softplus(dt + bias) within limits; and each head's rate and skip weight.
    Checkpoints call `log_rate` A_log, `bias` dt_bias and `skip` D."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"log_rate": 0, "bias": 0, "skip": 0}

    def __init__(self, num_heads: int, limit: tuple[float, float]) -> None:
        super().__init__()
        self.limit = limit
        self.log_rate, self.bias, self.skip = (
            nn.Parameter(torch.empty(num_heads, dtype=torch.float32)) for _ in range(3)
        )

    def init_weights(self, std: float = 0.0) -> None:
        """Rates 1, 2, ..., biases and skip weights one, as in transformers."""
        rates = torch.arange(1, len(self.log_rate) + 1, dtype=torch.float32, device=self.log_rate.device)
        with torch.no_grad():
            self.log_rate.copy_(rates.log())
        nn.init.ones_(self.bias)
        nn.init.ones_(self.skip)

    def forward(self, dt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt (B, T, heads) -> step sizes (B, T, heads), rates A and skip weights D (heads,), at least fp32."""
        bias, log_rate, skip = (local(self, parameter) for parameter in (self.bias, self.log_rate, self.skip))
        steps = F.softplus(dt.to(torch.promote_types(dt.dtype, torch.float32)) + bias)
        if self.limit != (0.0, math.inf):
            steps = steps.clamp(*self.limit)
        return steps, -log_rate.exp(), skip.clone()  # FSDP2 frees the parameter after this forward pass


class GatedGroupNorm(FullPrecision):
    """RMSNorm over the channels of each group, after or before the gate: see `ops.gated_rms_norm`."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"weight": 0}

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.size, self.eps = config.inner_size // config.num_groups, config.norm_eps
        self.norm_before_gate = config.norm_before_gate
        self.weight = nn.Parameter(torch.empty(config.inner_size, dtype=torch.float32))

    def init_weights(self, std: float = 0.0) -> None:
        """Scale one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z (B, T, channels) -> (B, T, channels), of their dtype."""
        x, z = (tensor.unflatten(-1, (-1, self.size)) for tensor in (x, z))
        weight = local(self, self.weight).view(-1, self.size)
        return ops.gated_rms_norm(x, z, weight, self.eps, self.norm_before_gate).flatten(2)
