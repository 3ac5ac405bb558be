"""AFMoE (Arcee's Trinity): gated attention, norms before and after the sublayers, and mixtures of experts.

Layers with a sliding window have rotary positions, layers of full attention have no positions."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import expert_layouts, shared_and_routed
from ligermodels.layers import NormConfig, QKNormConfig, RouterConfig

AFMOE = {
    "vocab_size": 200192,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "sliding_window": 1024,
    "global_attn_every_n_layers": 4,
    "moe_intermediate_size": 1408,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "route_scale": 1.0,
}
FIXED = {
    "n_group": 1,
    "topk_group": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
    "route_norm": True,
    "score_func": "sigmoid",
}
"""Field of published configs -> its only implemented value, as in transformers."""
NAMES = {
    "attention.gate": "self_attn.gate_proj",
    "norm.mlp_norm": "pre_mlp_layernorm",
    "norm.mlp_post_norm": "post_mlp_layernorm",
    "experts.router": "mlp.router.gate.weight",
    "experts.selection_bias": "mlp.expert_bias",
    "experts.shared": "mlp.shared_experts.{part}_proj",
}


def afmoe(config: Config) -> DecoderConfig:
    """The composed config of an `AfmoeConfig` dict."""
    fields = Fields(config, AFMOE)
    fields.ignore("output_router_logits", "load_balance_coeff", "use_grouped_mm")  # no loss uses router logits
    fields.choices("attention_bias", False, default=False)
    for name, only in FIXED.items():
        fields.choices(name, only, default=only)
    norm = NormConfig(fields.number("rms_norm_eps", negative=False), casting_mode="gemma")
    windows = fields.windows(lambda layer: (layer + 1) % fields.size("global_attn_every_n_layers") != 0)
    own: dict[str, Any] = {"qk_norm": QKNormConfig(norm), "output_gate": True}
    dense = fields.size("num_dense_layers", zero=True)
    router = RouterConfig(
        *fields.experts("num_experts"),
        scores="sigmoid",
        selection_bias=True,
        eps=1e-20,
        scale=fields.number("route_scale"),
    )

    def attention(layer: int, common: Any) -> dict[str, Any]:
        return {**own, "window": windows[layer], **({"rope": None} if windows[layer] is None else {})}

    return decoder(
        fields,
        norm=norm,
        attention=attention,
        mlp=shared_and_routed(fields, router, lambda layer: layer < dense, "num_shared_experts"),
        block={"post_norm": True},
        input_scale=fields.size("hidden_size") ** 0.5 if fields.flag("mup_enabled", False) else 1.0,
    )


FAMILIES = (Family("afmoe", afmoe, expert_layouts(NAMES, stacked={"experts.router": NAMES["experts.router"]})),)
