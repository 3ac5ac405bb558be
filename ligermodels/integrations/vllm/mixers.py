"""vLLM's attention layers and state caches in a native model's mixers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention as EngineAttention

from ligermodels.errors import ConfigError
from ligermodels.integrations.vllm.plan import AttentionPlan, StatePlan
from ligermodels.integrations.vllm.states import EngineStates
from ligermodels.layers.external_attention import AttentionLayer
from ligermodels.layers.external_states import RecurrentLayer
from ligermodels.layers.sharding import local
from ligermodels.models.decoder import Decoder


def replace_caches(
    decoder: Decoder, plans: Mapping[str, AttentionPlan | StatePlan], vllm_config: VllmConfig, prefix: str
) -> nn.ModuleList:
    """Let vLLM compute the attention of a decoder's mixers, with its paged cache, and keep their recurrent states.

    Args:
        decoder: the decoder, with its parameters on the device; its mixers get an `external` attention or state.
        plans: the plan of each mixer, by its name in the decoder; under tensor parallelism of this rank's heads.
        vllm_config: vLLM's config.
        prefix: prefix of the names of the layers in vLLM.

    Returns:
        vLLM's attention layers, which must become a submodule of vLLM's model.

    Raises:
        ConfigError: the module of a mixer has no place for another attention or state; the message names its class.
    """
    cache_config = copy.copy(vllm_config.cache_config)
    cache_config.sliding_window = None  # the default of layers without a window
    names = {name: _layer_name(name, prefix) for name in plans}
    layers = nn.ModuleList()
    for name, plan in plans.items():
        mixer = decoder.get_submodule(name)
        base = RecurrentLayer if isinstance(plan, StatePlan) else AttentionLayer
        if not isinstance(mixer, base):
            raise ConfigError(
                f"{name}: {type(mixer).__name__} has no place for vLLM's cache; derive it from "
                f"{base.__module__}.{base.__name__}"
            )
        if isinstance(plan, StatePlan):
            mixer.external = EngineStates(plan, vllm_config, names[name])
            continue
        options: dict[str, Any] = {"cache_config": cache_config, "prefix": names[name]}
        if (sinks := local(mixer, getattr(mixer, "sinks", None))) is not None:
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


def _layer_name(name: str, prefix: str) -> str:
    """The name in vLLM, which reads the number of the block from it: one whole number between dots."""
    _, number, place = name.split(".", 2)
    return f"{prefix}.layers.{number}.{place.replace('.', '_')}.cache".removeprefix(".")


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
