"""Multi-head latent attention (DeepSeek-V2, 2024, https://arxiv.org/abs/2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import WeightMapping, rename, rotated_first
from ligermodels.errors import ConfigError
from ligermodels.layers.activation import gate_heads
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.config_checks import check_choice, check_sizes
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.context_parallel import shard_attention
from ligermodels.layers.external_attention import AttentionLayer
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.latent_cache import LatentCache, LayerLatents
from ligermodels.layers.linear import Linear
from ligermodels.layers.norm import NormConfig
from ligermodels.layers.query_scaling import QueryScaling
from ligermodels.layers.rope import RopeConfig
from ligermodels.layers.sharding import TensorSharding, split_evenly, used_in_parts
from ligermodels.ops import Float8Form


@dataclass(frozen=True)
class LatentAttentionConfig(LayerConfig):
    """Multi-head latent attention: keys and values are projections of a latent per token.

    Args:
        num_heads: number of heads.
        plain_dim: channels of a query or key without rotation.
        rotated_dim: rotated channels of a query or key. All heads share these channels of keys, which without `rope`
            are not rotated.
        value_dim: channels of a value.
        kv_rank: channels of the latent of keys and values.
        q_rank: channels of the latent of queries; None to project queries from the hidden states.
        rope: rotary embedding of the rotated channels; None for attention without positions.
        norm: norm of the latents.
        bias: whether the projections to latents and the output projection have biases.
        softmax_scale: factor of the scores; None for key_dim ** -0.5.
        stored_as_pairs: whether checkpoints rotate neighbouring channels together; the weight map then reorders them.
            (Checkpoints have the rotated channels of a head last, and the weight map moves them to the front.)
        query_scaling: scaling of queries by position, or None.
        head_gate: activation of a gate, a projection of the input, that multiplies each head's output: "sigmoid" or
            "softplus", as in `AttentionConfig` (Ling 3.0); None for no gate.
        backend: name of an attention backend, or "auto". Comparisons of configs ignore it.

    Raises:
        ConfigError: fields do not fit together; the message names the field.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "latent.q": "self_attn.q_proj",
        "latent.q_a": "self_attn.q_a_proj",
        "latent.q_a_norm": "self_attn.q_a_layernorm",
        "latent.q_b": "self_attn.q_b_proj",
        "latent.kv_a": "self_attn.kv_a_proj_with_mqa",
        "latent.kv_a_norm": "self_attn.kv_a_layernorm",
        "latent.kv_b": "self_attn.kv_b_proj",
        "latent.o": "self_attn.o_proj",
        "latent.head_gate": "self_attn.g_proj",
    }

    num_heads: int
    plain_dim: int
    rotated_dim: int
    value_dim: int
    kv_rank: int
    q_rank: int | None
    rope: RopeConfig | None
    norm: NormConfig = field(default_factory=lambda: NormConfig(1e-6))
    bias: bool = False
    softmax_scale: float | None = None
    stored_as_pairs: bool = False
    query_scaling: QueryScaling | None = None
    head_gate: Literal["sigmoid", "softplus"] | None = None
    backend: str = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "rotated_dim", "value_dim", "kv_rank")
        check_sizes(self, "plain_dim", least=0)
        check_choice(self, "head_gate", (None, "sigmoid", "softplus"))
        if self.q_rank is not None:
            check_sizes(self, "q_rank")
        if self.rope is not None and self.rope.channels != self.rotated_dim:
            raise ConfigError(f"rotated_dim: is {self.rotated_dim}, but rope is of {self.rope.channels} channels")

    def build(self, hidden_size: int) -> nn.Module:
        return LatentAttention(hidden_size, self)

    @property
    def key_dim(self) -> int:
        """Channels of a query or key."""
        return self.rotated_dim + self.plain_dim

    @property
    def latent_dim(self) -> int:
        """Channels of a token in the cache: the rotated channels of keys, and the latent."""
        return self.rotated_dim + self.kv_rank

    @property
    def ropes(self) -> Sequence[RopeConfig]:
        return () if self.rope is None else (self.rope,)

    def new_state(
        self,
        num_layers: int,
        batch_size: int,
        max_length: int,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LatentCache:
        up = self.num_heads, self.plain_dim + self.value_dim, self.kv_rank
        return LatentCache(num_layers, batch_size, max_length, self.latent_dim, up, dtype=dtype, device=device)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """Mappings of the layer's tensors; each projection is a tensor of its own.

        Args:
            hidden_size: channels of the hidden states.
            native: prefix of the native tensors.
            checkpoint: prefix of the checkpoint tensors.
            names: part -> name in this family.
        """
        sources = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        biased = ("weight", "bias") if self.bias else ("weight",)
        reordered = [("kv_a", 1, self.latent_dim, biased)]
        renamed = [("kv_b", ("weight",)), ("kv_a_norm", ("weight",)), ("o", biased)]
        if self.q_rank is None:
            reordered.append(("q", self.num_heads, self.key_dim, ("weight",)))
        else:
            renamed += [("q_a", biased), ("q_a_norm", ("weight",))]
            reordered.append(("q_b", self.num_heads, self.key_dim, ("weight",)))
        if self.head_gate is not None:
            renamed.append(("head_gate", ("weight",)))
        mappings = [
            rename(f"{native}.{part}.{kind}", f"{sources[f'latent.{part}']}.{kind}")
            for part, kinds in renamed
            for kind in kinds
        ]
        for part, heads, dim, kinds in reordered:
            for kind in kinds:
                source = f"{sources[f'latent.{part}']}.{kind}"
                order = (heads, dim, self.rotated_dim, self.stored_as_pairs)
                mappings.append(rotated_first(f"{native}.{part}.{kind}", source, *order))
        return mappings

    def tensor_shard(self, ranks: int) -> LatentAttentionConfig:
        """Divide the heads over ranks; latents are the same on all ranks."""
        return replace(self, num_heads=split_evenly("num_heads (num_attention_heads)", self.num_heads, ranks))

    def with_attention_backend(self, name: str) -> LatentAttentionConfig:
        return replace(self, backend=name)

    def state_elements(self, max_length: int) -> int:
        return max_length * self.latent_dim

    def info(self) -> dict[str, Any]:
        ranks = {"kv_rank": self.kv_rank} | ({} if self.q_rank is None else {"q_rank": self.q_rank})
        return {"heads": self.num_heads, "head_dim": self.key_dim, "value_head_dim": self.value_dim, **ranks}


class LatentAttention(AttentionLayer):
    """Multi-head latent attention.

    The rows of `kv_a` are the rotated channels of keys, then the latent. For each head, `q` (or `q_b`) has the rotated
    rows first, and `kv_b` has the rows of keys, then the rows of values. `head_gate` is a linear layer with an output
    for each head, or None. The number of heads is taken from the projections' outputs, because these may be
    tensor-parallel shards.

    Decoding caches only the latents. With K and V the rows of `kv_b` for a head, and a latent c, q K c = (K^T q) c.
    So latents act as keys and values of a single head that all queries share, and V multiplies its output. The prefill
    computes K and V by applying `kv_b` to the unit vectors, so a module that replaces `kv_b` must be linear.

    Context parallelism gathers the latents, since they are small, and each rank computes all keys and values.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {
        **{"q": "columns", "q_b": "columns", "kv_b": "gathered_columns", "o": "rows"},
        **{"q_a": "replicated", "kv_a": "replicated", "head_gate": "columns"},
    }
    context_parallel: ClassVar[bool] = True
    float8_linears: ClassVar[Mapping[str, str | None]] = {
        **{"q": INPUT, "q_a": INPUT, "kv_a": INPUT},
        **{"q_b": None, "kv_b": None, "o": None},
    }
    sequence_parallel: ClassVar[bool] = True

    def __init__(self, hidden_size: int, config: LatentAttentionConfig) -> None:
        super().__init__()
        self.config = config
        queries = config.num_heads * config.key_dim
        if config.q_rank is None:
            self.q = Linear(hidden_size, queries, bias=False)
        else:
            self.q_a = Linear(hidden_size, config.q_rank, bias=config.bias)
            self.q_a_norm = config.norm.build(config.q_rank)
            self.q_b = Linear(config.q_rank, queries, bias=False)
        self.kv_a = Linear(hidden_size, config.latent_dim, bias=config.bias)
        self.kv_a_norm = config.norm.build(config.kv_rank)
        self.kv_b = Linear(config.kv_rank, config.num_heads * (config.plain_dim + config.value_dim), bias=False)
        self.o = Linear(config.num_heads * config.value_dim, hidden_size, bias=config.bias)
        self.head_gate = None if config.head_gate is None else Linear(hidden_size, config.num_heads, bias=False)

    def input_form(self) -> Float8Form | None:
        """See `Layer.input_form`. `head_gate` reads `x` in the model's dtype."""
        return None if self.head_gate is not None else super().input_form()

    def forward(self, x: Tensor, context: ForwardContext, state: LayerLatents | None = None) -> Tensor:
        """Attend.

        Args:
            x: hidden states, (B, T, H).
            context: context of the forward pass.
            state: decoding state; the tokens of x are added to it.

        Returns:
            (B, T, H).
        """
        config = self.config
        q = self._queries(x, context)
        rotated, latent = self.kv_a(x).split([config.rotated_dim, config.kv_rank], dim=-1)
        rotated, latent = (used_in_parts(self, tensor) for tensor in (rotated, self.kv_a_norm(latent)))
        rotated = self._rotate(rotated[:, :, None], context)
        if state is not None and context.cache_seqlens is not None:
            state.append(torch.cat([rotated[:, :, 0], latent], dim=-1), context.cache_seqlens)
            return self._output(self._decode(q, state, context).to(x.dtype), x)
        if state is not None:
            unit = torch.eye(config.kv_rank, dtype=latent.dtype, device=latent.device)
            up = self.kv_b(unit).T.unflatten(0, (-1, config.plain_dim + config.value_dim))
            state.fill(torch.cat([rotated[:, :, 0], latent], dim=-1), up)
        if context.shard is not None:
            all_tokens = context.shard.all_tokens(torch.cat([rotated[:, :, 0].to(latent.dtype), latent], dim=-1))
            rotated, latent = all_tokens.split([config.rotated_dim, config.kv_rank], dim=-1)
            rotated = rotated[:, :, None]
        heads = self.kv_b(latent).unflatten(-1, (-1, config.plain_dim + config.value_dim))
        plain, v = heads.split([config.plain_dim, config.value_dim], dim=-1)
        k = torch.cat([rotated.to(plain.dtype).expand(-1, -1, plain.shape[2], -1), plain], dim=-1)
        options: dict[str, Any] = {"softmax_scale": config.softmax_scale, "backend": config.backend}
        if self.external is not None:
            out = self.external(q, k, v)
        elif context.shard is None:
            out = ops.attention(q, k, v, cu_seqlens=context.cu_seqlens, **options)
        else:
            out = shard_attention(q, k, v, context.cu_seqlens, context.shard, **options)
        return self._output(out, x)

    def _output(self, out: Tensor, x: Tensor) -> Tensor:
        """Heads' outputs (B, T, heads, value_dim) and the layer's input x (B, T, H) -> (B, T, H)."""
        return cast(Tensor, self.o(gate_heads(out, x, self.head_gate, self.config.head_gate).flatten(2)))

    def _queries(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x (B, T, H) -> rotated and scaled queries (B, T, heads, key_dim). InputError if scaling lacks positions."""
        config = self.config
        q = self.q(x) if config.q_rank is None else self.q_b(self.q_a_norm(self.q_a(x)))
        q = self._rotate(q.unflatten(-1, (-1, config.key_dim)), context)
        return q if config.query_scaling is None else config.query_scaling.scale(q, context.positions)

    def _rotate(self, x: Tensor, context: ForwardContext) -> Tensor:
        if self.config.rope is None:
            return x
        return ops.rope(x, x[:, :, :0], *context.rope_tables[self.config.rope])[0]

    def _decode(self, q: Tensor, state: LayerLatents, context: ForwardContext) -> Tensor:
        """q (B, T, heads, key_dim) -> (B, T, heads, value_dim), in the state's dtype."""
        config, (latents, up) = self.config, state
        keys, values = up.split([config.plain_dim, config.value_dim], dim=1)
        rotated, plain = q.to(latents.dtype).split([config.rotated_dim, config.plain_dim], dim=-1)
        shared = latents[:, :, None]
        out = ops.decode_attention(
            torch.cat([rotated, torch.einsum("bthn,hnc->bthc", plain, keys)], dim=-1),
            shared,
            shared,
            cast(Tensor, context.cache_seqlens),
            softmax_scale=config.key_dim**-0.5 if config.softmax_scale is None else config.softmax_scale,
            tree_mask=None if context.tree is None else context.tree.mask,
        )
        return torch.einsum("bthc,hdc->bthd", out[..., config.rotated_dim :], values)
