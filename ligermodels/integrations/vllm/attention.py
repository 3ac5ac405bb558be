"""vLLM's attention layers in place of the attention of a native model's mixers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad
from vllm.config import CacheConfig
from vllm.model_executor.layers.attention import Attention as EngineAttention

from ligermodels.errors import ConfigError
from ligermodels.integrations.vllm.plan import AttentionPlan
from ligermodels.layers.external_attention import AttentionLayer
from ligermodels.models.decoder import Decoder


def replace_attention(
    decoder: Decoder, plans: Mapping[int, AttentionPlan], cache_config: CacheConfig, prefix: str
) -> nn.ModuleList:
    """Let vLLM compute the attention of all blocks of a decoder, with its paged cache.

    Args:
        decoder: the decoder, with its parameters on the device; its mixers get an `external` attention.
        plans: the plan of each block with a token mixer, by the number of the block.
        cache_config: vLLM's config of the cache.
        prefix: prefix of the names of the layers in vLLM.

    Returns:
        vLLM's layers, which must become a submodule of vLLM's model.

    Raises:
        ConfigError: the module of a mixer has no place for another attention; the message names its class.
    """
    cache_config = copy.copy(cache_config)
    cache_config.sliding_window = None  # the default of layers without a window
    names = {number: f"{prefix}.layers.{number}.self_attn.attn".removeprefix(".") for number in plans}
    layers = nn.ModuleList()
    for number, plan in plans.items():
        mixer = decoder.blocks[number].mixer
        if not isinstance(mixer, AttentionLayer):
            raise ConfigError(
                f"blocks[{number}].mixer: {type(mixer).__name__} has no place for vLLM's attention; derive it from "
                "ligermodels.layers.external_attention.AttentionLayer"
            )
        options: dict[str, Any] = {"cache_config": cache_config, "prefix": names[number]}
        if (sinks := getattr(mixer, "sinks", None)) is not None:
            options["sinks"] = sinks
        if plan.kv_from is not None:
            options["kv_sharing_target_layer_name"] = names[plan.kv_from]
        layer = EngineAttention(
            plan.num_heads, plan.cache_dim, plan.scale, plan.num_kv_heads,
            logits_soft_cap=plan.softcap, per_layer_sliding_window=plan.window, **options,
        )  # fmt: skip
        mixer.external = _External(layer, plan)
        layers.append(layer)
    return layers


class _External:
    """One attention layer of vLLM as `ExternalAttention`. No module, so that it is no part of the native model."""

    def __init__(self, layer: EngineAttention, plan: AttentionPlan) -> None:
        self.layer, self.plan = layer, plan

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """See `ExternalAttention`. Zeros pad the narrower of keys and values: they change no score and no output."""
        width, flat = self.plan.cache_dim, []
        for x in (q, k, v):
            x = x if x is None or x.shape[3] == width else pad(x, (0, width - x.shape[3]))
            flat.append(None if x is None else x.to(q.dtype).reshape(-1, x.shape[2] * width))
        out: Tensor = self.layer(*flat)
        return out.view(*q.shape[:2], self.plan.num_heads, width)[..., : self.plan.value_dim]
