"""gpt-oss (OpenAI, 2025, https://arxiv.org/abs/2508.10925): attention sinks, and a mixture of experts with biases."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.fields import renamed
from ligermodels.convert.rope_settings import rope_parameters
from ligermodels.errors import ConfigError
from ligermodels.layers import MoEConfig, NormConfig, RouterConfig

DEFAULTS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.001,
}
ROPE = {
    "rope_type": "yarn",
    "default_theta": 150_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
NAMES = {
    "experts.router": "mlp.router.weight",
    "experts.router_bias": "mlp.router.bias",
    "experts.gate_up_pairs": "mlp.experts.gate_up_proj",
    "experts.down_transposed": "mlp.experts.down_proj",
}


def gpt_oss(config: Config) -> DecoderConfig:
    """The composed config of a `GptOssConfig` dict."""
    fields = Fields(renamed(config, "num_local_experts", "num_experts"), DEFAULTS)
    fields.choices("hidden_act", "silu", "swish", default="silu")
    # Published configs also have older names of these fields; transformers reads only the newer names.
    context = rope_parameters(config, ROPE).get("original_max_position_embeddings")
    for name, newer, value in (
        ("experts_per_token", "num_experts_per_tok", fields.config["num_experts_per_tok"]),
        ("initial_context_length", "original_max_position_embeddings", context),
    ):
        if value is not None and fields.optional_size(name) not in (None, value):
            raise ConfigError(f"{fields.where}: {name} = {fields.config[name]} contradicts {newer} = {value}")
    bias = fields.flag("attention_bias", True)
    windows = fields.windows(lambda layer: layer % 2 == 0)
    activation: dict[str, Any] = {
        "alpha": fields.number("swiglu_alpha", positive=True),
        "limit": fields.number("swiglu_limit", positive=True),
        "up_offset": 1.0,
    }
    router = RouterConfig(*fields.experts("num_local_experts"), bias=True)
    return decoder(
        fields,
        attention=lambda layer, common: {"bias": bias, "o_bias": bias, "window": windows[layer], "sinks": True},
        mlp=lambda layer, gated: MoEConfig(router, gated.size, gated.activation, bias=True, **activation),
        norm=NormConfig(fields.number("rms_norm_eps", negative=False), casting_mode="gemma"),
        default_theta=ROPE,
        router_aux_loss_coef=fields.router_aux_loss_coef(),
    )


FAMILIES = (Family("gpt_oss", gpt_oss, [{"names": NAMES}], ROPE),)
