"""EXAONE 3 and 3.5: the layers of Llama.

EXAONE 4: norms only after the sublayers and over the heads of queries and keys; NoPE in full-attention layers.

K-EXAONE: the same attention, norms before the sublayers, and mixtures of experts in all layers except the first few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import grouped_router, published_layouts, shared_and_routed
from ligermodels.archs.fields import DENSE, SPARSE, name_of
from ligermodels.archs.llama import llama_decoder
from ligermodels.layers import NormConfig, QKNormConfig

EXAONE = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
EXAONE_FIELDS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
"""Field of published EXAONE 3 configs -> Llama's name, which transformers 5 writes."""
EXAONE_THETA = 500_000.0
EXAONE_LAYOUT = {
    "prefix": "transformer",
    "names": {
        **{f"attention.{part}": f"attn.attention.{part}_proj" for part in "qkv"},
        "attention.o": "attn.attention.out_proj",
        "mlp.gate": "mlp.c_fc_0",
        "mlp.up": "mlp.c_fc_1",
        "mlp.down": "mlp.c_proj",
        "norm.mixer_norm": "ln_1",
        "norm.mlp_norm": "ln_2",
        "decoder.embed": "wte",
        "decoder.layers": "h",
        "decoder.norm": "ln_f",
    },
}
"""Names of published EXAONE 3 checkpoints."""
DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


EXAONE_MOE = {
    **DEFAULTS,
    "pad_token_id": 0,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
NAMES = {"experts.shared": "mlp.shared_experts.{part}_proj"}
PUBLISHED = {**NAMES, "experts.selection_bias": "mlp.e_score_correction_bias"}


def exaone(config: Config) -> DecoderConfig:
    """The composed config of an `ExaoneConfig` dict."""
    layers, eps, activation = (name_of(config, name, published) for published, name in EXAONE_FIELDS.items())
    fields = Fields(config, EXAONE)
    fields.ignore(*EXAONE_FIELDS)
    fields = fields.replaced(num_hidden_layers=fields.size(layers), rms_norm_eps=fields.number(eps, negative=False))
    return llama_decoder(fields, activation=activation, default_theta=EXAONE_THETA)


def exaone4(config: Config) -> DecoderConfig:
    """The composed config of an `Exaone4Config` dict: with a window, layers without it have no positions."""
    fields = Fields(config, DEFAULTS)
    return decoder(fields, attention=_attention(fields), block={"pre_norm": False, "post_norm": True})


def exaone_moe(config: Config) -> DecoderConfig:
    """The composed config of an `ExaoneMoeConfig` dict; without its MTP layers."""
    fields = Fields(config, EXAONE_MOE)
    fields.ignore("output_router_logits")  # no loss uses router logits
    first = fields.size("first_k_dense_replace", zero=True)
    kinds = fields.kinds("mlp_layer_types", (DENSE, SPARSE), lambda layer: DENSE if layer < first else SPARSE)
    router = grouped_router(fields, "num_experts")
    return decoder(
        fields,
        attention=_attention(fields),
        mlp=shared_and_routed(fields, router, lambda layer: kinds[layer] == DENSE, "num_shared_experts"),
    )


def _attention(fields: Fields) -> Callable[[int, Any], dict[str, Any]]:
    """The argument `attention` of `compose.decoder`."""
    hybrid = fields.optional_size("sliding_window") is not None
    windows = fields.windows(lambda layer: hybrid and (layer + 1) % fields.size("sliding_window_pattern") != 0)
    own = {"qk_norm": QKNormConfig(NormConfig(fields.number("rms_norm_eps", negative=False)))}

    def attention(layer: int, common: Any) -> dict[str, Any]:
        whole = hybrid and windows[layer] is None
        return {**own, "window": windows[layer], **({"rope": None} if whole else {})}

    return attention


FAMILIES = (
    Family(
        "exaone",
        exaone,
        [EXAONE_LAYOUT, {}],
        EXAONE_THETA,
        attribute_map=EXAONE_FIELDS,
        architecture="LlamaForCausalLM",
        module_layout={},
    ),
    Family("exaone4", exaone4),
    Family(
        "exaone_moe",
        exaone_moe,
        [{**layout, "ignored": (r"^mtp\.",)} for layout in published_layouts(PUBLISHED, NAMES)],
    ),
)
