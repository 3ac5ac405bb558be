"""Grouped-query self-attention with rotary positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import WeightMapping, grouped_qkv, grouped_qkv_in_one, heads, rename, rows
from ligermodels.errors import ConfigError
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.config_checks import check_multiple, check_numbers, check_sizes
from ligermodels.layers.context import ForwardContext, KeysValues
from ligermodels.layers.context_parallel import shard_attention
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.kv_cache import KVCache, LayerKV
from ligermodels.layers.layer import Layer
from ligermodels.layers.linear import Linear
from ligermodels.layers.qkv import ProjectionNormSplitQKV, QKNormConfig, SplitQKV, Tables, ValueConfig
from ligermodels.layers.query_scaling import QueryScaling
from ligermodels.layers.rope import RopeConfig
from ligermodels.layers.sharding import TensorSharding, local, split_evenly
from ligermodels.ops.runtime.tensors import as_dtype


@dataclass(frozen=True)
class AttentionConfig(LayerConfig):
    """Heads and behaviour of one attention layer.

    `rope` None means no positions at all; `softmax_scale` None means head_dim ** -0.5; `window` counts the token
    itself; `softcap` caps the scores; `bias` and `o_bias` are those of q/k/v and of the output projection; `backend`
    names an attention backend, which is no part of what makes two configs equal. With `stored_as_pairs`, checkpoints
    rotate neighbouring channels 2 i and 2 i + 1 of a head together (GLM, ERNIE): the weight map reorders them, and the
    computation is as ever. `query_scaling` multiplies rotated queries by a factor of their positions. With
    `output_gate`, heads' outputs are multiplied by the sigmoid of a projection of the input (Qwen3-Next), which
    checkpoints have within `q_proj`: of each head its rows of q, then those of its gate. With `sinks` each query head
    has a learned logit, one more in the denominator of its softmax (gpt-oss). `values` says how values come from the
    projection where they are not simply in it. With `shares_kv`, later layers can attend to the keys and values of
    this one: see `SharedKVAttentionConfig`.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.sinks": "self_attn.sinks",
    }

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    bias: bool = False
    o_bias: bool = False
    qk_norm: QKNormConfig | None = None
    softmax_scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    stored_as_pairs: bool = False
    query_scaling: QueryScaling | None = None
    output_gate: bool = False
    sinks: bool = False
    values: ValueConfig | None = None
    shares_kv: bool = False
    backend: str = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "num_kv_heads", "head_dim", "window")
        check_multiple(self, "num_heads", "num_kv_heads")
        check_numbers(self, "softcap", positive=True)
        if self.rope is not None and self.rope.channels > self.head_dim:
            raise ConfigError(f"rope: rotates {self.rope.channels} channels of heads that have {self.head_dim}")
        for name, has_it in (("stored_as_pairs", self.stored_as_pairs), ("values", self._values_from_keys)):
            if self.output_gate and has_it:  # the weight map has no rule for them
                raise ConfigError(f"output_gate: is not implemented together with {name}")

    def build(self, hidden_size: int) -> nn.Module:
        return Attention(hidden_size, self)

    @property
    def group_size(self) -> int:
        """Query heads a key/value head serves."""
        return self.num_heads // self.num_kv_heads

    @property
    def _values_from_keys(self) -> bool:
        return self.values is not None and self.values.from_keys

    @property
    def _heads_of_group(self) -> int:
        """Heads that the projection has for each key/value head: queries, key, value, and output gates."""
        return self.group_size * (1 + self.output_gate) + (1 if self._values_from_keys else 2)

    @property
    def has_extra_output(self) -> bool:
        return self.shares_kv

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
    ) -> KVCache:
        return KVCache(num_layers, batch_size, max_length, self.num_kv_heads, self.head_dim, dtype=dtype, device=device)

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """q, k and v are tensors of their own, or one, all queries first, where `names` has an "attention.qkv"."""
        there = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        pairs = self.rope.channels if self.rope is not None and self.stored_as_pairs else 0
        shape = (self.num_kv_heads, self.group_size, self.head_dim, pairs)
        found = []
        for kind in ("weight", "bias") if self.bias else ("weight",):
            target = f"{native}.qkv.{kind}"
            if self.output_gate:
                sources = (f"{there[f'attention.{part}']}.{kind}" for part in "qkv")
                found.append(rows(target, self._gated_rows(*sources)))
            elif "attention.qkv" in names:
                found.append(grouped_qkv_in_one(target, f"{there['attention.qkv']}.{kind}", *shape))
            else:
                q, k, v = (f"{there[f'attention.{part}']}.{kind}" for part in "qkv")
                found.append(grouped_qkv(target, q, k, None if self._values_from_keys else v, *shape))
        for kind in ("weight", "bias") if self.o_bias else ("weight",):
            found.append(rename(f"{native}.o.{kind}", f"{there['attention.o']}.{kind}"))
        if self.sinks:
            found.append(rename(f"{native}.sinks", there["attention.sinks"]))
        return [*found, *self._norm_mappings(native, there, pairs)]

    def _norm_mappings(self, native: str, there: Mapping[str, str], pairs: int) -> Iterator[WeightMapping]:
        """The norms of queries and keys, of one head or of all; `there` are the names of parts in the checkpoint."""
        if self.qk_norm is None:
            return
        for norm, count in (("q_norm", self.num_heads), ("k_norm", self.num_kv_heads)):
            source = f"{there[f'attention.{norm}']}.weight"
            count = count if self.qk_norm.over == "projection" else 1
            yield heads(f"{native}.split.{norm}", source, count, self.head_dim, pairs)

    def _gated_rows(self, q: str, k: str, v: str) -> Iterator[tuple[str, int, int, int]]:
        """For `rows`: within each key/value head its query heads, its key, its value, its query heads' gates."""
        dim, group, at = self.head_dim, self.group_size, 0
        for kv in range(self.num_kv_heads):
            starts = [2 * (kv * group + head) * dim for head in range(group)]
            gates = [(q, start + dim) for start in starts]
            for source, start in [*((q, start) for start in starts), (k, kv * dim), (v, kv * dim), *gates]:
                yield source, start, at, dim
                at += dim

    def tensor_shard(self, ranks: int) -> AttentionConfig:
        """By key/value heads, each with its query heads."""
        kv_heads = split_evenly("num_kv_heads (num_key_value_heads)", self.num_kv_heads, ranks)
        return replace(self, num_heads=self.num_heads // ranks, num_kv_heads=kv_heads)

    def with_attention_backend(self, name: str) -> AttentionConfig:
        return replace(self, backend=name)

    def state_elements(self, max_length: int) -> int:
        return 2 * max_length * self.num_kv_heads * self.head_dim

    def info(self) -> dict[str, Any]:
        return {"heads": self.num_heads, "kv_heads": self.num_kv_heads, "head_dim": self.head_dim}


class Attention(Layer):
    """Self-attention; `qkv` holds for each key/value head its group of query heads, then its key, then its value, then
    the output gates of its query heads if there are any.

    Parameter `sinks` (num_heads,), None where the config has none.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"qkv": "columns", "o": "rows", "sinks": 0}
    context_parallel: ClassVar[bool] = True
    sequence_parallel: ClassVar[bool] = True
    float8_linears: ClassVar[Mapping[str, str | None]] = {"qkv": INPUT, "o": None}

    def __init__(self, hidden_size: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_kv_heads * config._heads_of_group * config.head_dim
        self.qkv = Linear(hidden_size, width, bias=config.bias)
        whole = config.qk_norm is not None and config.qk_norm.over == "projection"
        split = ProjectionNormSplitQKV if whole else SplitQKV
        self.split = split(config.num_heads, config.num_kv_heads, config.head_dim, config.qk_norm, config.values)
        self.o = Linear(config.num_heads * config.head_dim, hidden_size, bias=config.o_bias)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        self.init_weights()

    def init_weights(self, std: float = 0.02) -> None:
        """Sinks normal(0, std), as in transformers."""
        if self.sinks is not None:
            nn.init.normal_(self.sinks, std=std)

    def forward(
        self, x: Tensor, context: ForwardContext, state: LayerKV | None = None
    ) -> Tensor | tuple[Tensor, KeysValues | None]:
        """x (B, T, H) -> (B, T, H).

        If the config has `shares_kv`, the result is (hidden states, `KeysValues`), with None in a decoding pass. The
        keys and values of x are added to a `state`."""
        q, k, v, gate = self.project(x, context, state)
        if self.config.query_scaling is not None:
            q = self.config.query_scaling.scale(q, context.positions)
        if context.shard is not None:  # once, also for the layers that share them
            k, v = context.shard.all_tokens(k), context.shard.all_tokens(v)
        if state is None:
            out = self._attend(q, k, v, context)
        else:
            out = self._attend_with_state(q, k, v, context, state, x.dtype)
        out = out.flatten(2)
        out = self.o(out if gate is None else out * gate.sigmoid())
        if not self.config.shares_kv:
            return out
        return out, None if state is not None and context.cache_seqlens is not None else KeysValues(k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        """q (B, T, num_heads, D), k and v (B, T, num_kv_heads, D), of all ranks -> (B, T, num_heads, D)."""
        options = {**self.score_options, "backend": self.config.backend}
        if context.shard is None:
            return ops.attention(q, k, v, cu_seqlens=context.cu_seqlens, **options)
        return shard_attention(q, k, v, context.cu_seqlens, context.shard, **options)

    def _attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, state: LayerKV, dtype: torch.dtype
    ) -> Tensor:
        """`_attend` in a prefill, which fills the `state`, or in a decoding pass, whose k and v are all its slots."""
        if context.cache_seqlens is None:
            state.fill(k, v)
            return self._attend(q, k, v, context)
        mask = None if context.tree is None else context.tree.mask
        out = ops.decode_attention(q, k, v, context.cache_seqlens, tree_mask=mask, **self.score_options)
        return as_dtype(out, dtype)

    @property
    def score_options(self) -> dict[str, Any]:
        """The options of attention ops that change scores."""
        scale, window, softcap = self.config.softmax_scale, self.config.window, self.config.softcap
        return {"softmax_scale": scale, "window": window, "softcap": softcap, "sinks": local(self, self.sinks)}

    def project(
        self, x: Tensor, context: ForwardContext, state: LayerKV | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Project hidden states to normalised and rotated queries and keys, to values and to output gates.

        Args:
            x: hidden states (B, T, H).
            context: context of the forward pass.
            state: decoding state. In a decoding pass, the new keys and values are written to it.

        Returns:
            q (B, T, num_heads, D); k and v (B, T, num_kv_heads, D), in a decoding pass all slots of the state; and the
            gates (B, T, num_heads * D) or None.
        """
        config = self.config
        tables: Tables = (None, None) if config.rope is None else context.rope_tables[config.rope]
        qkv, gate = self.qkv(x), None
        if config.output_gate:
            # of all key/value heads, or of those of this rank
            heads = qkv.unflatten(-1, (-1, config._heads_of_group, config.head_dim))
            parts = heads.split([heads.shape[-2] - config.group_size, config.group_size], dim=-2)
            qkv, gate = (part.flatten(2) for part in parts)
        return *self.split(qkv, tables, state, context.cache_seqlens), gate
