"""EXAONE 4: norms only after the sublayers and over the heads of queries and keys; NoPE in full-attention layers.

K-EXAONE: the same attention, norms before the sublayers, and mixtures of experts in all layers except the first few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.experts import grouped_router, published_layouts, shared_and_routed
from ligermodels.archs.fields import DENSE, SPARSE
from ligermodels.layers import NormConfig, QKNormConfig

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
    Family("exaone4", exaone4),
    Family(
        "exaone_moe",
        exaone_moe,
        [{**layout, "ignored": (r"^mtp\.",)} for layout in published_layouts(PUBLISHED, NAMES)],
    ),
)
