"""Self-attention to the keys and values of an earlier layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import WeightMapping, heads, rename
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.attention_config import AttentionConfig
from ligermodels.layers.config_checks import check_sizes
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.context_parallel import shard_attention
from ligermodels.layers.external_attention import AttentionLayer
from ligermodels.layers.float8 import INPUT
from ligermodels.layers.kv_cache import LayerKV
from ligermodels.layers.linear import Linear
from ligermodels.layers.packing import document_of
from ligermodels.layers.sharding import TensorSharding
from ligermodels.layers.tokens import SelectedTokens


@dataclass(frozen=True)
class SharedKVAttentionConfig(AttentionConfig):
    """Attention that computes only queries, and uses the keys and values of layer `kv_from` (Gemma 3n, Gemma 4).

    Layer `kv_from` is an `Attention` with `shares_kv`, and with keys and values of the same shape. This layer has no
    decoding state, and its result for a token does not depend on the hidden states of other tokens.

    Raises:
        ConfigError: a field is out of range or not implemented here; the message names it.
    """

    kv_from: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "kv_from", least=0)
        for name in ("values", "shares_kv", "query_scaling", "sinks", "output_gate", "head_gate", "chunk"):
            if vars(self)[name]:
                raise ConfigError(f"{name}: is not implemented for attention to the keys and values of another layer")
        norm = self.qk_norm
        if norm is not None and (norm.over != "head" or norm.after_rope or not norm.has_weight):
            raise ConfigError(
                "qk_norm: for shared keys and values only norms of heads, before the rotation and with a weight, are "
                "implemented"
            )

    def build(self, hidden_size: int) -> nn.Module:
        return SharedKVAttention(hidden_size, self)

    @property
    def state_from(self) -> int | None:
        return self.kv_from

    def new_state(self, *sizes: int, **options: Any) -> None:  # type: ignore[override]
        return None

    def state_elements(self, max_length: int) -> int:
        return 0

    def weight_mappings(
        self, hidden_size: int, native: str, checkpoint: str, names: Mapping[str, str]
    ) -> list[WeightMapping]:
        """Mappings of the query and output projections.

        Args:
            hidden_size: channels of the hidden states.
            native: prefix of the native tensors.
            checkpoint: prefix of the checkpoint tensors.
            names: part -> name in this family.
        """
        sources = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        pairs = self.rope.channels if self.rope is not None and self.stored_as_pairs else 0
        mappings = [
            heads(f"{native}.q.{kind}", f"{sources['attention.q']}.{kind}", self.num_heads, self.head_dim, pairs)
            for kind in (("weight", "bias") if self.bias else ("weight",))
        ]
        for kind in ("weight", "bias") if self.o_bias else ("weight",):
            mappings.append(rename(f"{native}.o.{kind}", f"{sources['attention.o']}.{kind}"))
        if self.qk_norm is not None:
            source = f"{sources['attention.q_norm']}.weight"
            mappings.append(heads(f"{native}.q_norm.weight", source, 1, self.head_dim, pairs))
        return mappings

    def unused(self, checkpoint: str, names: Mapping[str, str]) -> list[str]:
        sources = {**self.NAMES, **names}
        parts = ("attention.k", "attention.v", "attention.k_norm")
        return [rf"^{re.escape(f'{checkpoint}.{sources[part]}')}\." for part in parts]


class SharedKVAttention(AttentionLayer):
    """Attends with the queries of x to the keys and values of layer `kv_from`. These come from the context or, while
    decoding, from the state of that layer."""

    token_wise = True
    context_parallel: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"q": "columns", "o": "rows"}
    float8_linears: ClassVar[Mapping[str, str | None]] = {"q": INPUT, "o": None}

    def __init__(self, hidden_size: int, config: SharedKVAttentionConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.head_dim
        self.q = Linear(hidden_size, width, bias=config.bias)
        self.q_norm = None if config.qk_norm is None else config.qk_norm.norm.build_for_heads(config.head_dim)
        self.o = Linear(width, hidden_size, bias=config.o_bias)

    def forward(self, x: Tensor, context: ForwardContext, state: LayerKV | None = None) -> Tensor:
        """Attend.

        Args:
            x: hidden states (B, T, H), or (1, n, H) of the needed tokens.
            context: context of the forward pass.
            state: decoding state of layer `kv_from`.

        Returns:
            The shape of x.

        Raises:
            InputError: layer `kv_from` shares no keys and values.
        """
        config = self.config
        options: dict[str, Any] = {"softmax_scale": config.softmax_scale, "softcap": config.softcap}
        windowed = {**options, "window": config.window}
        q, needed = self._queries(x, context), context.needed
        if self.external is not None:
            return cast(Tensor, self.o(self.external(q, None, None).flatten(2)))
        shared = context.keys_values.get(config.kv_from)
        if shared is not None and needed is not None and context.shard is None and q.shape[1] * _FEW <= needed.length:
            k, v = (tensor.flatten(0, 1)[None] for tensor in shared)
            visible = _visible(needed, config.window, context.cu_seqlens)
            return cast(Tensor, self.o(ops.attention(q, k, v, mask=visible, **options).flatten(2)))
        if needed is not None:
            q = needed.restore(q)  # attention needs the positions of all tokens
        if state is not None and context.cache_seqlens is not None:
            mask = None if context.tree is None else context.tree.mask
            keys, values = state
            out = ops.decode_attention(
                q.to(keys.dtype), keys, values, context.cache_seqlens, tree_mask=mask, **windowed
            ).to(x.dtype)
        elif shared is not None:
            k, v = shared
            windowed["backend"] = config.backend
            if context.shard is None:
                out = ops.attention(q, k, v, cu_seqlens=context.cu_seqlens, **windowed)
            else:
                out = shard_attention(q, k, v, context.cu_seqlens, context.shard, **windowed)
        else:
            raise InputError(f"kv_from: layer {config.kv_from} shares no keys and values; set its shares_kv")
        out = out.flatten(2)
        if needed is not None:
            out = needed.take(out)
        return cast(Tensor, self.o(out))

    def _queries(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x (B, T, H) -> normalised and rotated queries (B, T, heads, D). The number of heads is taken from the
        projection's output, because it may be a tensor-parallel shard."""
        q: Tensor = self.q(x).unflatten(-1, (-1, self.config.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.config.rope is None:
            return q
        no_keys = q[:, :, :0]
        return ops.rope(q, no_keys, *context.rope_tables[self.config.rope])[0]


_FEW = 8
"""If at most one token in _FEW is needed (a prefill), only the needed tokens attend, with a mask. Otherwise all tokens
attend, because kernels without a mask skip the keys that causality and documents hide; so they do under context
parallelism, where the keys are of all ranks, and the numbers of the needed tokens of one."""


def _visible(needed: SelectedTokens, window: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """Bool (1, n, B * T): the keys that each needed token sees, of the flattened ones."""
    queries = needed.indices[:, None]
    keys = torch.arange(needed.rows * needed.length, device=queries.device)
    allowed = (keys <= queries) & (keys // needed.length == queries // needed.length)
    if window is not None:
        allowed = allowed & (keys > queries - window)
    if cu_seqlens is not None:
        document = document_of(cu_seqlens, len(keys))
        allowed = allowed & (document == document[queries])
    return allowed[None]
