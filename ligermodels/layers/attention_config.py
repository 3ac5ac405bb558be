"""The config of grouped-query self-attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.convert.mappings import WeightMapping, grouped_qkv, grouped_qkv_in_one, heads, rename, rows
from ligermodels.errors import ConfigError
from ligermodels.layers.attention import Attention
from ligermodels.layers.config import LayerConfig
from ligermodels.layers.config_checks import check_choice, check_multiple, check_numbers, check_sizes
from ligermodels.layers.kv_cache import KVCache
from ligermodels.layers.norm import NormConfig
from ligermodels.layers.query_scaling import QueryScaling
from ligermodels.layers.rope import RopeConfig
from ligermodels.layers.sharding import split_evenly


@dataclass(frozen=True)
class QKNormConfig:
    """RMSNorm of queries and keys before they are rotated: of each head, or of the whole projection (OLMo 2).

    Without `has_weight` the scale is one, and nothing is stored (Muse Glimmer). With `after_rope` the heads are rotated
    first (HunYuan)."""

    norm: NormConfig
    over: Literal["head", "projection"] = "head"
    has_weight: bool = True
    after_rope: bool = False

    def __post_init__(self) -> None:
        check_choice(self, "over", ("head", "projection"))
        if self.norm.kind != "rms":
            raise ConfigError(f"norm: of queries and keys must be of kind 'rms', got {self.norm.kind!r}")
        if not self.has_weight and (self.over != "head" or self.norm.offset):
            raise ConfigError("has_weight: without a weight the norm must be over the head, and have no offset")
        if self.after_rope and self.over != "head":
            raise ConfigError("after_rope: must be a norm over the head")


@dataclass(frozen=True)
class ValueConfig:
    """How values come from the projection, where it is not as they are: with `norm_eps` each head is divided by its
    root mean square, with this eps under the root (an RMSNorm without weight); with `from_keys` the projection has no
    values, and these are its keys before their norm and rotation. Gemma 4 has both. `dim` are the channels of a value,
    if they are fewer than those of a key, and `scale` is a factor of values (MiMo-V2)."""

    norm_eps: float | None = None
    from_keys: bool = False
    dim: int | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "norm_eps", "scale")
        check_sizes(self, "dim")
        if self.from_keys and self.dim is not None:
            raise ConfigError("dim: values that are keys have the channels of keys")

    @property
    def only_norm(self) -> bool:
        """Whether values are those of the projection, normalised."""
        return not self.from_keys and self.dim is None and self.scale == 1.0

    def from_projection(self, v: Tensor, head_dim: int) -> Tensor:
        """v (..., value channels) -> (..., head_dim), normalised, scaled, and with zeros behind its channels: caches
        and kernels of attention take keys and values of one width."""
        v = v if self.norm_eps is None else ops.rms_norm(v, None, self.norm_eps)
        v = v if self.scale == 1.0 else v * self.scale
        return v if v.shape[-1] == head_dim else F.pad(v, (0, head_dim - v.shape[-1]))


@dataclass(frozen=True)
class AttentionConfig(LayerConfig):
    """Heads and behaviour of one attention layer.

    `rope` None means no positions at all; `softmax_scale` None means head_dim ** -0.5; `window` counts the token
    itself; `softcap` caps the scores; `bias` and `o_bias` are those of q/k/v and of the output projection; `backend`
    names an attention backend, which is no part of what makes two configs equal. With `stored_as_pairs`, checkpoints
    rotate neighbouring channels 2 i and 2 i + 1 of a head together (GLM, ERNIE): the weight map reorders them, and the
    computation is as ever. `query_scaling` multiplies rotated queries by a factor of their positions. With
    `output_gate`, heads' outputs are multiplied by the sigmoid of a projection of the input. Checkpoints have it as a
    tensor of its own if the family names an "attention.gate" (AFMoE); otherwise within `q_proj`, for each head its rows
    of q, then its rows of the gate (Qwen3-Next). With `sinks` each query head has a learned logit, one more in the
    denominator of its softmax (gpt-oss). With a `chunk`, tokens attend within blocks of so many tokens of their
    document (Llama 4's `attention_chunk_size`); that is not implemented for rows of more tokens, which are refused.
    With a `head_gate` each head's output is multiplied by one number, that activation of a projection of the input
    (LFM3). `values` says how values come from the projection where they are not simply in it. With `shares_kv`, later
    layers can attend to the keys and values of this one: see `SharedKVAttentionConfig`.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.sinks": "self_attn.sinks",
        "attention.head_gate": "self_attn.g_proj",
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
    chunk: int | None = None
    softcap: float | None = None
    stored_as_pairs: bool = False
    query_scaling: QueryScaling | None = None
    output_gate: bool = False
    sinks: bool = False
    head_gate: Literal["sigmoid", "softplus"] | None = None
    values: ValueConfig | None = None
    shares_kv: bool = False
    backend: str = field(default="auto", compare=False)

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "num_kv_heads", "head_dim", "window", "chunk")
        check_multiple(self, "num_heads", "num_kv_heads")
        check_numbers(self, "softcap", positive=True)
        check_choice(self, "head_gate", (None, "sigmoid", "softplus"))
        if self.rope is not None and self.rope.channels > self.head_dim:
            raise ConfigError(f"rope: rotates {self.rope.channels} channels of heads that have {self.head_dim}")
        if self.value_dim > self.head_dim:
            raise ConfigError(f"values: have {self.value_dim} channels, more than the {self.head_dim} of keys")
        narrow = self.value_dim < self.head_dim
        for name, other, has_other in (
            ("output_gate", "stored_as_pairs", self.stored_as_pairs),
            ("output_gate", "values", self._values_from_keys or narrow),
            ("stored_as_pairs", "values of fewer channels than keys", narrow),
            ("shares_kv", "values of fewer channels than keys", narrow),
        ):
            if vars(self)[name] and has_other:  # the weight map has no rule for them
                raise ConfigError(f"{name}: is not implemented together with {other}")

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
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.head_dim if self.values is None or self.values.dim is None else self.values.dim

    @property
    def group_width(self) -> int:
        """Channels that the projection has for each key/value head: queries, key, value, and output gates."""
        value = 0 if self._values_from_keys else self.value_dim
        return (self.group_size * (1 + self.output_gate) + 1) * self.head_dim + value

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
        """q, k and v are tensors of their own, or one, all queries first, where `names` has an "attention.qkv".

        Args:
            hidden_size: hidden size of the model.
            native: name of the layer in the model.
            checkpoint: name of its block in the checkpoint.
            names: the family's names of parts of a layer, where they differ from `NAMES`.
        """
        there = {part: f"{checkpoint}.{name}" for part, name in {**self.NAMES, **names}.items()}
        pairs = self.rope.channels if self.rope is not None and self.stored_as_pairs else 0
        shape = (self.num_kv_heads, self.group_size, self.head_dim, pairs, self.value_dim)
        found = []
        for kind in ("weight", "bias") if self.bias else ("weight",):
            target = f"{native}.qkv.{kind}"
            if self.output_gate:
                gate = there.get("attention.gate")
                q, k, v = (f"{there[f'attention.{part}']}.{kind}" for part in "qkv")
                found.append(rows(target, self._gated_rows(q, k, v, gate and f"{gate}.{kind}")))
            elif "attention.qkv" in names:
                found.append(grouped_qkv_in_one(target, f"{there['attention.qkv']}.{kind}", *shape))
            else:
                q, k, v = (f"{there[f'attention.{part}']}.{kind}" for part in "qkv")
                found.append(grouped_qkv(target, q, k, None if self._values_from_keys else v, *shape))
        for kind in ("weight", "bias") if self.o_bias else ("weight",):
            found.append(rename(f"{native}.o.{kind}", f"{there['attention.o']}.{kind}"))
        return [*found, *self._mappings_by_head(native, there), *self._norm_mappings(native, there, pairs)]

    def _mappings_by_head(self, native: str, there: Mapping[str, str]) -> Iterator[WeightMapping]:
        """The gates and sinks of heads; `there` are the names of parts in the checkpoint."""
        if self.head_gate is not None:
            yield rename(f"{native}.gate.weight", f"{there['attention.head_gate']}.weight")
        if self.sinks:
            yield rename(f"{native}.sinks", there["attention.sinks"])

    def _norm_mappings(self, native: str, there: Mapping[str, str], pairs: int) -> Iterator[WeightMapping]:
        """The norms of queries and keys, of one head or of all; `there` are the names of parts in the checkpoint."""
        if self.qk_norm is None or not self.qk_norm.has_weight:
            return
        for norm, count in (("q_norm", self.num_heads), ("k_norm", self.num_kv_heads)):
            source = f"{there[f'attention.{norm}']}.weight"
            count = count if self.qk_norm.over == "projection" else 1
            yield heads(f"{native}.split.{norm}", source, count, self.head_dim, pairs)

    def _gated_rows(self, q: str, k: str, v: str, gate: str | None) -> Iterator[tuple[str, int, int, int]]:
        """For `rows`: within each key/value head its query heads, its key, its value, its query heads' gates, which are
        rows of the tensor `gate`, or of `q` if there is none."""
        dim, group, at = self.head_dim, self.group_size, 0
        for kv in range(self.num_kv_heads):
            starts = [(kv * group + head) * dim * (1 if gate else 2) for head in range(group)]
            gates = [(gate, start) if gate else (q, start + dim) for start in starts]
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
        sizes = {"heads": self.num_heads, "kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        return sizes if self.value_dim == self.head_dim else {**sizes, "value_head_dim": self.value_dim}
