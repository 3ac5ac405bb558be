"""Grouped-query self-attention with rotary positions.

The fused projection is split into queries, keys and values, normalised and rotated in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.layers.activation import gate_heads
from ligermodels.layers.context import ForwardContext, KeysValues
from ligermodels.layers.context_parallel import shard_attention
from ligermodels.layers.external_attention import AttentionLayer
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.kv_cache import LayerKV
from ligermodels.layers.linear import Linear
from ligermodels.layers.sharding import TensorSharding, is_tensor_parallel, local, mean_over_ranks
from ligermodels.ops import Float8Form
from ligermodels.ops.norm.rms_norm import rms_norm_reference
from ligermodels.ops.runtime.tensors import as_dtype, elementwise

if TYPE_CHECKING:
    from ligermodels.layers.attention_config import AttentionConfig, QKNormConfig, ValueConfig

Tables = tuple[Tensor | None, Tensor | None]


class Attention(AttentionLayer):
    """Self-attention; `qkv` holds for each key/value head its group of query heads, then its key, then its value, then
    the output gates of its query heads if there are any.

    Parameter `sinks` (num_heads,), and module `gate`, a linear layer with an output for each head: None where the
    config has none.
    """

    batch_invariant: ClassVar[bool] = True
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {
        "qkv": "columns",
        "gate": "columns",
        "o": "rows",
        "sinks": 0,
    }
    context_parallel: ClassVar[bool] = True
    sequence_parallel: ClassVar[bool] = True
    float8_linears: ClassVar[Mapping[str, str | None]] = {"qkv": INPUT, "o": None}

    def __init__(self, hidden_size: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = Linear(hidden_size, config.num_kv_heads * config.group_width, bias=config.bias)
        shape = config.num_heads, config.num_kv_heads, config.head_dim
        self.split = _split_class(config.qk_norm)(*shape, config.qk_norm, config.values)
        self.o = Linear(config.num_heads * config.value_dim, hidden_size, bias=config.o_bias)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        self.gate = None if config.head_gate is None else Linear(hidden_size, config.num_heads, bias=False)
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
        keys and values of x are added to a `state`.

        Args:
            x: (B, T, H).
            context: positions, packing and backend of the pass.
            state: keys and values of earlier tokens, in decoding; None without a cache.
        """
        q, k, v, gate = self.project(x, context, state)
        if self.config.query_scaling is not None:
            q = self.config.query_scaling.scale(q, context.positions)
        if context.shard is not None:  # once, also for the layers that share them
            k, v = context.shard.all_tokens(k), context.shard.all_tokens(v)
        if state is None or self.external is not None:
            out = self._attend(q, k, v, context)
        else:
            out = self._attend_with_state(q, k, v, context, state, x.dtype)
        if gate is not None or self.gate is not None or self.config.values is not None:
            out = self._narrowed_and_gated(out, x, gate)
        out = self.o(out.flatten(2))
        if not self.config.shares_kv:
            return out
        return out, None if state is not None and context.cache_seqlens is not None else KeysValues(k, v)

    def input_form(self) -> Float8Form | None:
        """See `Layer.input_form`. `gate` reads `x` in the model's dtype."""
        return None if self.gate is not None else super().input_form()

    def _check_length(self, chunk: int, length: int) -> None:
        """InputError if rows of `length` keys, or slots for them in a state, are longer than a chunk of the config."""
        if length > chunk:
            raise InputError(
                f"chunk (attention_chunk_size): layers of this model attend within chunks of {chunk} tokens, which is "
                f"not implemented for longer rows; got room for {length}: give rows, or prompts with their new tokens, "
                f"of at most {chunk} tokens"
            )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        """q (B, T, num_heads, D), k and v (B, T, num_kv_heads, D), of all ranks -> (B, T, num_heads, D). An external
        attention has its own limits."""
        if self.external is not None:
            return self.external(q, k, v)
        if self.config.chunk is not None:
            self._check_length(self.config.chunk, k.shape[1] if context.shard is None else context.shard.length)
        options = {**self._score_options, "backend": self.config.backend}
        if context.shard is None:
            return ops.attention(q, k, v, cu_seqlens=context.cu_seqlens, **options)
        return shard_attention(q, k, v, context.cu_seqlens, context.shard, **options)

    def _attend_with_state(
        self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext, state: LayerKV, dtype: torch.dtype
    ) -> Tensor:
        """`_attend` in a prefill, which fills the `state`, or in a decoding pass, whose k and v are all its slots."""
        if self.config.chunk is not None:
            self._check_length(self.config.chunk, state.keys.shape[1])
        if context.cache_seqlens is None:
            state.fill(k, v)
            return self._attend(q, k, v, context)
        mask = None if context.tree is None else context.tree.mask
        out = ops.decode_attention(q, k, v, context.cache_seqlens, tree_mask=mask, **self._score_options)
        return as_dtype(out, dtype)

    @property
    def _score_options(self) -> dict[str, Any]:
        """The options of attention ops that change scores."""
        scale, window, softcap = self.config.softmax_scale, self.config.window, self.config.softcap
        return {"softmax_scale": scale, "window": window, "softcap": softcap, "sinks": local(self, self.sinks)}

    def _narrowed_and_gated(self, out: Tensor, x: Tensor, gate: Tensor | None) -> Tensor:
        """The results (B, T, num_heads, D) for hidden states x, without the zeros behind values narrower than keys,
        times the gates of heads and the output `gate`: (B, T, num_heads, value_dim)."""
        if self.config.values is not None:
            out = out[..., : self.config.value_dim]
        out = gate_heads(out, x, self.gate, self.config.head_gate)
        return out if gate is None else out * elementwise(torch.sigmoid, gate).unflatten(-1, out.shape[2:])

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
            gates (B, T, num_heads * D) or None. Values narrower than D have zeros behind them.
        """
        rope, qkv, gate = self.config.rope, self.qkv(x), None
        tables: Tables = (None, None) if rope is None else context.rope_tables[rope]
        if self.config.output_gate:
            qkv, gate = self._without_gates(qkv)
        return *self.split(qkv, tables, state, context.cache_seqlens), gate

    def _without_gates(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """The projection (B, T, C) without the output gates, and the gates (B, T, num_heads * D)."""
        config = self.config
        heads_of_group = config.group_width // config.head_dim
        heads = qkv.unflatten(-1, (-1, heads_of_group, config.head_dim))  # with key/value heads of this rank
        qkv, gates = heads.split([heads.shape[-2] - config.group_size, config.group_size], dim=-2)
        return qkv.flatten(2), gates.flatten(2)


class SplitQKV(nn.Module):
    """Splits the fused projection, normalises queries and keys, and rotates them.

    It owns the weights of both norms, `q_norm` and `k_norm`, if there are any: norm and rotation are one kernel. The
    number of key/value heads is that of the projection it is given, which may be a tensor-parallel shard.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"q_norm": "replicated", "k_norm": "replicated"}

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm: QKNormConfig | None,
        values: ValueConfig | None = None,
    ) -> None:
        super().__init__()
        self.group_size, self.head_dim, self.qk_norm = num_heads // num_kv_heads, head_dim, qk_norm
        self.values, self.norm_options = values, {} if qk_norm is None else qk_norm.norm.options
        self._keys_width = head_dim * (self.group_size + 1)
        value_width = head_dim if values is None else 0 if values.from_keys else values.dim or head_dim
        self._group_width = self._keys_width + value_width
        self.q_norm: nn.Parameter | None = None
        self.k_norm: nn.Parameter | None = None
        if qk_norm is not None and qk_norm.has_weight:
            whole = qk_norm.over == "projection"
            self.q_norm = nn.Parameter(torch.empty(head_dim * (num_heads if whole else 1)))
            self.k_norm = nn.Parameter(torch.empty(head_dim * (num_kv_heads if whole else 1)))
            self.init_weights()

    def init_weights(self, std: float = 0.0) -> None:
        """Scales one."""
        if self.qk_norm is not None and self.q_norm is not None and self.k_norm is not None:
            for weight in (self.q_norm, self.k_norm):
                nn.init.constant_(weight, 1.0 - self.qk_norm.norm.offset)

    def extra_repr(self) -> str:
        norm = "" if self.qk_norm is None else f", qk_norm over each {self.qk_norm.over}"
        return f"group_size={self.group_size}, head_dim={self.head_dim}{norm}"

    def forward(
        self, qkv: Tensor, tables: Tables, cache: LayerKV | None = None, cache_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv (B, T, Hkv * (group + 2) * D) -> q (B, T, Hq, D), k and v (B, T, Hkv, D), q and k rotated. The width is
        Hkv * (group + 1) * D where values are `from_keys`.

        With `cache_seqlens`, long (B,), k and v are written to the slots of `cache` from there on instead, and what is
        returned are all slots of it.

        Args:
            qkv: the result of the projection, in the layout above.
            tables: cos and sin of the rotation, or None and None without one.
            cache: keys and values of the layer, given with `cache_seqlens`.
            cache_seqlens: number of tokens of each sequence in the cache.
        """
        kv_heads = self._num_kv_heads(qkv)
        norms = (None, None) if self.qk_norm is None else self._norm_weights(self.qk_norm, qkv)
        if cache is not None and cache_seqlens is not None:
            return self._cached(qkv, tables, cache, cache_seqlens, *norms)
        if self.values is not None:
            qkv = self._with_values(qkv)
        return ops.rope_qkv(qkv, *tables, kv_heads, self.group_size, self.head_dim, *norms, **self.norm_options)

    def _norm_weights(self, qk_norm: QKNormConfig, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """The weights (head_dim,) of the norms of queries and keys: ones for norms without weights."""
        if not qk_norm.has_weight:
            return (qkv.new_ones(self.head_dim),) * 2
        return local(self, self.q_norm, partial=True), local(self, self.k_norm, partial=True)

    def _num_kv_heads(self, qkv: Tensor) -> int:
        """Key/value heads of the projection; InputError unless it has as many heads for each of them."""
        kv_heads, rest = divmod(qkv.shape[-1], self._group_width)
        if rest:
            raise InputError(
                f"qkv: width {qkv.shape[-1]} is no multiple of {self._group_width}, a key/value head with its "
                "query heads; shard the projection by key/value heads"
            )
        return kv_heads

    def _with_values(self, qkv: Tensor) -> Tensor:
        """(B, T, Hkv * group width) -> (..., Hkv * (group + 2) * D), of each group the values last."""
        if self.values is None:
            return qkv
        groups = qkv.unflatten(-1, (self._num_kv_heads(qkv), -1))
        v = groups[..., -(self.values.dim or self.head_dim) :]
        v = self.values.from_projection(v, self.head_dim)
        return torch.cat([groups[..., : self._keys_width], v], dim=-1).flatten(-2)

    def _cached(
        self,
        qkv: Tensor,
        tables: Tables,
        cache: LayerKV,
        cache_seqlens: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`forward` in a decoding pass: the queries, and all slots of the cache."""
        options: dict[str, Any] = dict(self.norm_options)
        kv_heads, values = self._num_kv_heads(qkv), self.values
        if values is not None and values.only_norm:  # it is in the same kernel
            options["value_norm_eps"] = values.norm_eps
        else:
            qkv = self._with_values(qkv)
        qkv, shape = as_dtype(qkv, cache.keys.dtype), (kv_heads, self.group_size, self.head_dim)
        q = ops.rope_qkv_cached(qkv, *tables, *shape, *cache, cache_seqlens, q_norm, k_norm, **options)
        return q, cache.keys, cache.values


class LateNormSplitQKV(SplitQKV):
    """The same with norms of heads after the rotation, `QKNormConfig.after_rope`, in kernels of their own."""

    def forward(
        self, qkv: Tensor, tables: Tables, cache: LayerKV | None = None, cache_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SplitQKV.forward` for qkv, tables, cache and cache_seqlens."""
        shape = self._num_kv_heads(qkv), self.group_size, self.head_dim
        q, k, v = ops.rope_qkv(self._with_values(qkv), *tables, *shape)
        q, k = self._normalised(q, k)
        if cache is None or cache_seqlens is None:
            return q, k, v
        return _in_cache(q, k, v, (None, None), cache, cache_seqlens)

    def _normalised(self, *heads: Tensor) -> list[Tensor]:
        """q and k, (B, T, heads, D), each head normalised."""
        weights = [local(self, weight, partial=True) for weight in (self.q_norm, self.k_norm)]
        return [ops.rms_norm(x, weight, **self.norm_options) for x, weight in zip(heads, weights, strict=True)]


class ProjectionNormSplitQKV(SplitQKV):
    """The same with norms over all heads together, `QKNormConfig.over` "projection": before the rotation, and under
    tensor parallelism by the mean square over all ranks, each of which has its heads' part of the weights."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"q_norm": 0, "k_norm": 0}

    def forward(
        self, qkv: Tensor, tables: Tables, cache: LayerKV | None = None, cache_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SplitQKV.forward` for qkv, tables, cache and cache_seqlens."""
        shape = self._num_kv_heads(qkv), self.group_size, self.head_dim
        q, k, v = ops.rope_qkv(self._with_values(qkv), None, None, *shape)
        q, k = self._normalised(q, k)
        if cache is None or cache_seqlens is None:
            cos, sin = tables
            return (q, k, v) if cos is None or sin is None else (*ops.rope(q, k, cos, sin), v)
        return _in_cache(q, k, v, tables, cache, cache_seqlens)

    def _normalised(self, *heads: Tensor) -> list[Tensor]:
        """q and k, (B, T, heads, D), each normalised over all of its heads."""
        rows = [each.flatten(2) for each in heads]
        weights = [local(self, weight) for weight in (self.q_norm, self.k_norm)]
        for x, weight in zip(rows, weights, strict=True):
            if len(weight) != x.shape[-1]:
                raise InputError(
                    f"the norm over the whole projection has {len(weight)} channels, the projection {x.shape[-1]}: "
                    "shard both by heads (ligermodels.parallel.tensor)"
                )
        if not is_tensor_parallel(self):
            normed = [ops.rms_norm(x, weight, **self.norm_options) for x, weight in zip(rows, weights, strict=True)]
        else:
            squares = mean_over_ranks(self, torch.stack([_mean_square(x) for x in rows]))
            parts = zip(rows, weights, squares, strict=True)
            normed = [rms_norm_reference(x, weight, mean_square=each, **self.norm_options) for x, weight, each in parts]
        return [x.view_as(each) for x, each in zip(normed, heads, strict=True)]


def _split_class(qk_norm: QKNormConfig | None) -> type[SplitQKV]:
    if qk_norm is not None and qk_norm.after_rope:
        return LateNormSplitQKV
    return ProjectionNormSplitQKV if qk_norm is not None and qk_norm.over == "projection" else SplitQKV


def _in_cache(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, cache: LayerKV, cache_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys, and write keys and values to the cache: the queries, and all slots of the cache."""
    heads = [each.unflatten(2, (k.shape[2], -1)) for each in (q, k, v)]
    qkv = as_dtype(torch.cat(heads, dim=3).flatten(2), cache.keys.dtype)
    shape = k.shape[2], q.shape[2] // k.shape[2], q.shape[3]
    return ops.rope_qkv_cached(qkv, *tables, *shape, *cache, cache_seqlens), cache.keys, cache.values


def _mean_square(x: Tensor) -> Tensor:
    """(..., n) -> (..., 1), float32; of float64 float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True)
