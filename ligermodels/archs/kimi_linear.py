"""Kimi Linear: Kimi Delta Attention, and latent attention without positions in some layers; mixtures of experts with
shared experts except in the first few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligermodels.archs.compose import STACKED_EXPERTS, Config, DecoderConfig, Family, Fields
from ligermodels.archs.deepseek import latent_decoder
from ligermodels.archs.experts import TRANSPOSED_EXPERTS, feed_forwards, grouped_router
from ligermodels.archs.fields import DENSE, FULL, name_of, renamed
from ligermodels.archs.mixtral import EXPERTS
from ligermodels.archs.qwen3_5 import LINEAR
from ligermodels.convert.json_values import is_object
from ligermodels.errors import ConfigError, short
from ligermodels.layers import KimiDeltaAttentionConfig

KIMI_LINEAR = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1024,
    "n_shared_experts": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.446,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "pad_token_id": 163839,
}
PUBLISHED_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "scoring_func": "moe_router_activation_func",
}
"""Field -> its name in published checkpoints."""
SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Field -> its name in `linear_attn_config`."""
FIXED = {"mla_use_nope": True, "use_grouped_topk": True, "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
"""Fields of which one value is implemented."""


def kimi_linear(config: Config) -> DecoderConfig:
    """The composed config of a `KimiLinearConfig` dict, with the names of published checkpoints or of transformers."""
    nested = config.get("linear_attn_config") or {}
    if not is_object(nested):
        raise ConfigError(f"config.json: field 'linear_attn_config' must be an object, got {short(nested)}")
    for name in SIZES.values():
        Fields(nested, where="config.json: linear_attn_config").optional_size(name)
    config = without_published_names(config)
    for name, inner in SIZES.items():
        inner_name = f"linear_attn_config.{inner}"
        config = renamed({**config, inner_name: nested.get(inner)}, name, inner_name)
    fields = Fields(config, KIMI_LINEAR)
    for name, only in FIXED.items():
        fields.choices(name, only, default=only)
    fields.choices("hidden_act", "silu", default=None)  # also of the convolutions
    fields.choices("rope_scaling", None, default=None)
    fields.reject_tied()
    fields.ignore("linear_attn_config", "head_dim")  # transformers replaces head_dim by qk_rope_head_dim
    groups, best = fields.size("n_group"), fields.size("topk_group")
    if best > groups:
        raise ConfigError(f"{fields.where}: topk_group {best} is above num_expert_group (n_group) {groups}")
    kinds = _mixers(fields, nested)
    feed_forward = feed_forwards(fields, first_dense=1)
    heads, width = fields.size("linear_num_heads"), fields.size("linear_head_dim")
    delta = KimiDeltaAttentionConfig(
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=width,
        value_head_dim=width,
        conv_width=fields.size("linear_conv_kernel_dim"),
        norm_eps=fields.number("rms_norm_eps", negative=False),
        gate_rank=width,
    )
    return latent_decoder(
        fields,
        rope=None,
        router=grouped_router(fields, name_of(config, "num_experts", "num_local_experts")),
        is_dense=lambda layer: feed_forward[layer] == DENSE,
        mixer=lambda layer, latent: latent if kinds[layer] == FULL else delta,
    )


def without_published_names(config: Config) -> Config:
    """`config` with the names of PUBLISHED_NAMES that transformers' modules read. ConfigError, with the name in
    `config`, for a bad value of a published name."""
    fields = Fields(config)
    if "moe_renormalize" in config:
        config = {**config, "moe_renormalize": fields.flag("moe_renormalize", True)}  # null is false
    fields.choices("moe_router_activation_func", "sigmoid", default="sigmoid")
    for name in ("model_max_length", "num_expert_group", "num_experts_per_token", "num_shared_experts"):
        fields.optional_size(name)
    for name, published in PUBLISHED_NAMES.items():
        config = renamed(config, name, published)
    return config


def _mixers(fields: Fields, nested: Mapping[str, Any]) -> list[str]:
    """The kind of each layer's mixer, by `layer_types` or by the layers, counted from 1, in `linear_attn_config`."""
    count = fields.size("num_hidden_layers")
    inner = Fields(nested, where=f"{fields.where}: linear_attn_config")
    full, linear = inner.layers("full_attn_layers"), inner.layers("kda_layers")
    if not full and not linear:
        return fields.kinds("layer_types", (LINEAR, FULL), lambda layer: FULL if layer and layer % 4 == 0 else LINEAR)
    if full & linear or full | linear != {*range(1, count + 1)}:
        raise ConfigError(
            f"{inner.where}: full_attn_layers and kda_layers must together have each layer from 1 to "
            f"num_hidden_layers = {count} once"
        )
    listed = [FULL if layer + 1 in full else LINEAR for layer in range(count)]
    if fields.kinds("layer_types", (LINEAR, FULL), listed.__getitem__) != listed:
        raise ConfigError(f"{inner.where} contradicts layer_types; remove one of them")
    return listed


LOG_DECAYS_4D = "delta.A_log_of_4d"
"""`A_log` in files that have it as (1, 1, heads, 1): see `KimiDeltaAttentionConfig.weight_mappings`."""
PUBLISHED = {
    **EXPERTS,
    "experts.selection_bias": "block_sparse_moe.gate.e_score_correction_bias",
    "experts.shared": "block_sparse_moe.shared_experts.{part}_proj",
    "delta.conv_parts": "self_attn.{part}_conv1d",
    LOG_DECAYS_4D: KimiDeltaAttentionConfig.NAMES["delta.A_log"],
}
SAVED = {**PUBLISHED, **{f"mlp.{part}": f"block_sparse_moe.{part}_proj" for part in ("gate", "up", "down")}}
"""As transformers 5 saves it: with the name of a mixture in dense layers too."""
DECAY = {part: KimiDeltaAttentionConfig.NAMES[part] for part in ("delta.decay_a", "delta.decay_b", "delta.dt_bias")}
DECAY[LOG_DECAYS_4D] = PUBLISHED[LOG_DECAYS_4D]
MODULES = {
    "experts.shared": "mlp.shared_experts.{part}_proj",
    **{part: name.replace(".", ".forget_gate.") for part, name in DECAY.items()},
}
"""Names of transformers' modules."""
FAMILIES = (
    Family(
        "kimi_linear",
        kimi_linear,
        [
            {"names": names}
            for names in (PUBLISHED, SAVED, {**MODULES, **STACKED_EXPERTS}, {**MODULES, **TRANSPOSED_EXPERTS})
        ],
        module_layout={"names": {**MODULES, **STACKED_EXPERTS}},
    ),
)
