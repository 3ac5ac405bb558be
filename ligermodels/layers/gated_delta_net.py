"""Gated DeltaNet (Yang et al., 2024, https://arxiv.org/abs/2412.06464), as in Qwen3-Next, Qwen3.5, OLMo
Hybrid and Lara."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import TensorView, WeightMapping, rename, rows
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
class GatedDeltaNetConfig(LayerConfig):
    """Config of a Gated DeltaNet layer. Value head j uses key head j // (num_value_heads / num_key_heads).

    `conv_width` is the number of tokens in the convolution, the current token included. `norm_eps` is the epsilon of
    the output's norm. `beta_scale` is a factor of beta, how far a token moves the state: with 2 the transition may have
    negative eigenvalues (OLMo Hybrid; Grazzi et al., 2024, https://arxiv.org/abs/2411.12537). `backend` is the backend
    of `ops.gated_delta_rule` in training and prefill; comparisons of configs ignore it.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "delta.qkv": "linear_attn.in_proj_qkv",
        "delta.z": "linear_attn.in_proj_z",
        "delta.b": "linear_attn.in_proj_b",
        "delta.a": "linear_attn.in_proj_a",
        "delta.conv": "linear_attn.conv1d",
        "delta.A_log": "linear_attn.A_log",
        "delta.dt_bias": "linear_attn.dt_bias",
        "delta.norm": "linear_attn.norm",
        "delta.out": "linear_attn.out_proj",
    }
    HEADS_FIELD: ClassVar[str] = "num_key_heads (linear_num_key_heads)"
    """Field of the number of key heads, and its name in config.json, for errors."""
    OUTPUT_GATE: ClassVar[str] = "silu"
    """Activation of the output gate."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int = 4
    norm_eps: float = 1e-6
    beta_scale: float = 1.0
    backend: str = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        check_sizes(self, "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_width")
        check_multiple(self, "num_value_heads", "num_key_heads")
        check_numbers(self, "norm_eps", "beta_scale")

    def build(self, hidden_size: int) -> nn.Module:
        return GatedDeltaNet(hidden_size, self)

    def build_decay(self) -> Decay:
        """The module of the gates of the value heads."""
        return Decay(self.num_value_heads, self.beta_scale)

    @property
    def key_size(self) -> int:
        """Channels of all key heads together; query heads have the same number."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        return self.key_size, self.key_size, self.value_size

    @property
    def conv_channels(self) -> int:
        """Channels of q, k and v together."""
        return sum(self.conv_parts)

    @property
    def projected(self) -> dict[str, int]:
        """Parts of the input projection -> their channels: q, k and v, then the others."""
        qkv = zip("qkv", self.conv_parts, strict=True)
        return {**dict(qkv), "z": self.value_size, "b": self.num_value_heads, "a": self.num_value_heads}

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
        matrix = self.num_value_heads, self.key_head_dim, self.value_head_dim
        conv_inputs = self.conv_width - 1, self.conv_channels
        return DeltaState(num_layers, batch_size, conv_inputs, matrix, dtype=dtype, device=device)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """Mappings of the layer's tensors. The input projection is stored in four tensors (qkv, z, b, a); in six if
        `names` has "delta.q", "delta.k" and "delta.v"; in one, with the native rows, if it has "delta.in"; or in two if
        it has "delta.qkvz" and "delta.ba": these have the rows of each key head together. The convolution is stored in
        one tensor, or in three, whose name has {part} for q, k and v: "delta.conv_parts", or, of equal sizes as by
        torch.chunk, "delta.conv_chunks".

        Args:
            hidden_size: channels of the hidden states.
            native: prefix of the native tensors.
            checkpoint: prefix of the checkpoint tensors.
            names: part -> name in this family.
        """
        sources = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        if "delta.in" in names:
            parts: Iterable[tuple[str, int, int, int]] = [("in", 0, 0, sum(self.projected.values()))]
        else:
            parts = self._packed_rows() if "delta.qkvz" in names else self._rows("delta.q" in sources)
        pieces = ((f"{sources[f'delta.{part}']}.weight", first, at, count) for part, first, at, count in parts)
        return [
            rows(f"{native}.in_proj.weight", pieces),
            WeightMapping(f"{native}.conv.weight", tuple(self._conv_views(sources))),
            rename(f"{native}.decay.log_rate", sources["delta.A_log"]),
            rename(f"{native}.decay.bias", sources["delta.dt_bias"]),
            rename(f"{native}.norm.weight", f"{sources['delta.norm']}.weight"),
            rename(f"{native}.out.weight", f"{sources['delta.out']}.weight"),
        ]

    def _conv_views(self, sources: Mapping[str, str]) -> Iterator[TensorView]:
        """The views of the convolution's weight; sources: part -> its name in the checkpoint."""
        if "delta.conv_parts" in sources:
            name, sizes = sources["delta.conv_parts"], self.conv_parts
        elif "delta.conv_chunks" in sources:
            size = -(-self.conv_channels // 3)
            name, sizes = sources["delta.conv_chunks"], (size, size, self.conv_channels - 2 * size)
        else:
            yield TensorView(f"{sources['delta.conv']}.weight", with_input_channel)
            return
        start = 0
        for part, size in zip("qkv", sizes, strict=True):
            view = partial(_channels_with_input_channel, start=start, length=size)
            yield TensorView(f"{name.format(part=part)}.weight", view)
            start += size

    def _rows(self, apart: bool) -> Iterator[tuple[str, int, int, int]]:
        """Pieces for `rows`: part, its first row in the checkpoint, its first native row, number of rows. q, k and v
        are three parts if they are `apart`, and one part otherwise."""
        sizes, start = self.projected, 0
        if not apart:
            sizes = {"qkv": self.conv_channels, **{part: n for part, n in sizes.items() if part not in "qkv"}}
        for part, size in sizes.items():
            yield part, 0, start, size
            start += size

    def _packed_rows(self) -> Iterator[tuple[str, int, int, int]]:
        """Pieces for `rows` of tensors that have the rows of all parts together for each key head: see `_rows`."""
        repeats = self.num_value_heads // self.num_key_heads
        keys, values = self.key_head_dim, repeats * self.value_head_dim
        tensors = {"qkvz": (keys, keys, values, values), "ba": (repeats, repeats)}
        start = 0
        for part, sizes in tensors.items():
            for i, size in enumerate(sizes):
                for head in range(self.num_key_heads):
                    yield part, head * sum(sizes) + sum(sizes[:i]), start + head * size, size
                start += self.num_key_heads * size

    def tensor_shard(self, ranks: int) -> GatedDeltaNetConfig:
        """Divide the key heads over ranks, together with their value heads."""
        key_heads = split_evenly(self.HEADS_FIELD, self.num_key_heads, ranks)
        return replace(self, num_key_heads=key_heads, num_value_heads=self.num_value_heads // ranks)

    def state_elements(self, max_length: int) -> int:
        matrix = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return (self.conv_width - 1) * self.conv_channels + matrix

    def info(self) -> dict[str, Any]:
        return {
            "linear_key_heads": self.num_key_heads,
            "linear_value_heads": self.num_value_heads,
            "linear_key_head_dim": self.key_head_dim,
            "linear_value_head_dim": self.value_head_dim,
        }


class GatedDeltaNet(RecurrentLayer):
    """The gated delta rule over convolved queries, keys and values. Its output is normalised and gated.

    The rows of `in_proj` are q, k, v, the gate z, b (how far the state moves to a value) and a (the decay). Tensor
    parallelism divides the rows evenly, regardless of these parts, so the weight is the same for any number of ranks.
    Outputs are gathered, and each rank takes the channels of its heads.

    Under context parallelism each rank has some tokens for its projections, norm and gate, and convolves and runs the
    delta rule over all tokens of a share of the heads (as DeepSpeed Ulysses does for attention, 2023,
    https://arxiv.org/abs/2309.14509).
    """

    float8_linears: ClassVar[Mapping[str, str | None]] = {"in_proj": INPUT, "out": None}
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"in_proj": "columns_to_all", "out": "rows"}
    sequence_parallel: ClassVar[bool] = True
    context_parallel: ClassVar[bool] = True

    def __init__(self, hidden_size: int, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        self.config = config
        self.in_proj = Linear(hidden_size, sum(config.projected.values()), bias=False)
        self.conv = CausalConv(config.conv_parts, config.conv_width)
        self.decay = config.build_decay()
        self.norm = GatedNorm(config.value_head_dim, config.norm_eps, config.OUTPUT_GATE)
        self.out = Linear(config.value_size, hidden_size, bias=False)

    def check_context_parallel(self, ranks: int) -> None:
        """Each rank computes whole key heads."""
        split_evenly(self.config.HEADS_FIELD, self.config.num_key_heads, ranks)

    def mix(self, x: Tensor, context: ForwardContext, state: LayerDelta | None) -> Tensor:
        config = self.config
        inputs, z, g, beta = self._project(x)
        heads = z.shape[2]
        keys, values = config.key_head_dim * heads * config.num_key_heads // config.num_value_heads, z.shape[2:].numel()
        if context.seq_lens is not None:  # padding must not change the state
            real = (torch.arange(x.shape[1], device=x.device) < context.seq_lens[:, None])[..., None]
            g, beta = (g.flatten(2) * real).view_as(g), beta * real
        shard, shares = context.shard, 1
        if shard is not None:  # all tokens, of this rank's share of the heads
            shares = shard.mesh.size()
            inputs = shard.share_of_channels(self.conv.shares(inputs, shares))
            gates = torch.cat([gate.flatten(2).unflatten(-1, (shares, -1)) for gate in (g, beta)], dim=-1)
            decays, beta = shard.share_of_channels(gates).split(
                [g.shape[2:].numel() // shares, heads // shares], dim=-1
            )
            g = decays.unflatten(-1, (-1, *g.shape[3:]))
        one = state is not None and context.tree is None and context.seq_lens is None and x.shape[1] == 1
        earlier = None
        if state is not None:
            inputs, earlier = inputs.to(state.inputs.dtype), state.inputs
        tree = None if context.tree is None else (context.tree.parent, context.tree.depth)
        convolved = self.conv(inputs, earlier, context.cu_seqlens, tree, one, shard)
        q, k, v = convolved.split([keys // shares, keys // shares, values // shares], dim=-1)
        q, k = (tensor.unflatten(-1, (-1, config.key_head_dim)) for tensor in (q, k))
        operands = q, k, v.unflatten(-1, (-1, config.value_head_dim)), g, beta
        if state is None:
            bounds = context.cu_seqlens
            o, _ = ops.gated_delta_rule(*operands, cu_seqlens=bounds, final_state=False, backend=config.backend)
        elif one:
            o = ops.gated_delta_rule_step(*operands, state.matrix)
        elif context.tree is not None:
            o, updates = ops.gated_delta_rule_tree(*operands, state.matrix, context.tree.mask)
            state.branch(inputs, updates, context.tree)
        else:
            o, last = ops.gated_delta_rule(*operands, initial_state=state.matrix, backend=config.backend)
            state.advance(inputs, last, context.seq_lens)
        o = o.to(z.dtype)
        if shard is not None:
            o = shard.share_of_tokens(o.flatten(2)).flatten(2).unflatten(-1, (heads, -1))
        return self.out(self.norm(o, z).flatten(2))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states (B, T, H) -> of this rank's R heads the inputs of the convolution (B, T, channels), the output
        gate z (B, T, R, V), g and beta (B, T, R)."""
        config = self.config
        parts = list(config.projected.values())
        projected = own_part_of_each(self, self.in_proj(x), parts)
        ranks = sum(parts) // projected.shape[-1]  # number of ranks that heads are divided over
        heads = config.num_value_heads // ranks
        sizes = [config.conv_channels, *parts[3:]]
        inputs, z, b, a = projected.split([size // ranks for size in sizes], dim=-1)
        return inputs, z.unflatten(-1, (heads, -1)), *self.decay(a, b)


class Decay(FullPrecision):
    """Gates of each value head: the logarithm of the state's decay before a token, and how far the token moves the
    state, times `beta_scale`; see `ops.delta_gates`. Checkpoints call `log_rate` A_log and `bias` dt_bias, which has
    `biases` numbers for each head."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"log_rate": 0, "bias": 0}

    def __init__(self, num_heads: int, beta_scale: float = 1.0, biases: int = 1) -> None:
        super().__init__()
        self.beta_scale = beta_scale
        self.log_rate = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(num_heads * biases, dtype=torch.float32))

    def init_weights(self, std: float = 0.0) -> None:
        """Rates uniform in (0.01, 16), biases one, as in transformers."""
        nn.init.uniform_(self.log_rate, 0.01, 16).log_()
        nn.init.ones_(self.bias)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """a, b (B, T, heads) -> g and beta (B, T, heads), at least fp32."""
        g, beta = ops.delta_gates(a, b, local(self, self.log_rate), local(self, self.bias))
        return g, beta if self.beta_scale == 1 else beta * self.beta_scale


class GatedNorm(FullPrecision):
    """RMSNorm(x) * activation(z); the activation is "silu" or "sigmoid"."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"weight": "replicated"}

    def __init__(self, size: int, eps: float, activation: str = "silu") -> None:
        super().__init__()
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))

    def init_weights(self, std: float = 0.0) -> None:
        """Scale one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z (..., heads, size) -> (..., heads, size), of their dtype."""
        return ops.gated_rms_norm(x, z, local(self, self.weight, partial=True), self.eps, activation=self.activation)


def _channels_with_input_channel(weight: Tensor, start: int, length: int) -> Tensor:
    """Some of the channels, (channels, width) -> (length, 1, width)."""
    return weight.narrow(0, start, length).unsqueeze(1)
