"""Cohere 2 (Command R7B, Command A): attention and feed-forward layer beside each other, after one LayerNorm.

Layers with a sliding window have rotary positions, layers of full attention have no positions.

Cohere 2 MoE (Command A+): the same with experts, after some dense layers, which may have positions of their own."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder, gate_activation
from ligermodels.archs.deepseek import fixed
from ligermodels.archs.experts import expert_layouts
from ligermodels.archs.fields import DENSE, SPARSE
from ligermodels.layers import LayerConfig, MLPConfig, MoEConfig, NormConfig, RouterConfig

COHERE2 = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
COHERE2_MOE = {
    **{name: value for name, value in COHERE2.items() if name != "layer_norm_eps"},
    "head_dim": 128,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "num_shared_experts": 0,
    "prefix_dense_sliding_window_pattern": 1,
}
FIXED = {
    "use_qk_norm": False,
    "use_parallel_block": True,
    "use_gated_activation": True,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}
"""Field of published configs -> its only implemented value, as in transformers."""


def cohere2(config: Config) -> DecoderConfig:
    """The composed config of a `Cohere2Config` dict."""
    fields = Fields(config, COHERE2)
    fixed(fields, "head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"), "num_attention_heads")
    windows = fields.windows(lambda layer: (layer + 1) % fields.size("sliding_window_pattern") != 0)
    norm = NormConfig(fields.number("layer_norm_eps", negative=False), kind="layer")
    return _cohere(fields, norm, windows, [window is not None for window in windows])


def cohere2_moe(config: Config) -> DecoderConfig:
    """The composed config of a `Cohere2MoeConfig` dict."""
    fields = Fields(config, COHERE2_MOE)
    fields.ignore("output_router_logits")  # logits that no loss uses
    context = fields.size("max_position_embeddings")
    fields.refuse_unread(["rope_scaling"], lambda fields: fields.rope(fields.size("head_dim"), context))
    first, period = fields.size("first_k_dense_replace", 0, zero=True), fields.size("sliding_window_pattern")
    dense_period = fields.size("prefix_dense_sliding_window_pattern")

    def slides(layer: int) -> bool:
        return (layer + 1) % dense_period != 0 if layer < first else (layer - first + 1) % period != 0

    windows = fields.windows(slides)
    kinds = fields.kinds("mlp_layer_types", (DENSE, SPARSE), lambda layer: DENSE if layer < first else SPARSE)
    eps = fields.config.get("rms_norm_eps")
    norm = NormConfig(fields.number("layer_norm_eps", 1e-5, negative=False), kind="layer")
    if eps is not None:
        norm = NormConfig(fields.number("rms_norm_eps", negative=False))
    rotates = [
        window is not None or (kind == DENSE and dense_period == 1) for window, kind in zip(windows, kinds, strict=True)
    ]
    fields.ignore("rms_norm_eps", "prefix_dense_intermediate_size")
    size = fields.size("prefix_dense_intermediate_size", fields.size("intermediate_size"))
    dense, sparse = MLPConfig(size, gate_activation(fields)), _mixture(fields)

    def feed_forward(layer: int) -> LayerConfig:
        return dense if kinds[layer] == DENSE else sparse

    return _cohere(fields, norm, windows, rotates, feed_forward=feed_forward)


def _mixture(fields: Fields) -> MoEConfig:
    """Experts chosen by their logits. With the strategy "average" the result is the mean of their sum and the shared
    expert."""
    scores = fields.choices("expert_selection_fn", "softmax", "sigmoid", default="softmax")
    shared_experts, size = fields.size("num_shared_experts", zero=True), fields.size("intermediate_size")
    strategy = fields.choices("shared_expert_combination_strategy", "average", "sum", default="average")
    share = 0.5 if shared_experts and strategy == "average" else 1.0
    normalize = fields.flag("norm_topk_prob", True) or scores == "softmax"
    router = RouterConfig(*fields.experts("num_experts"), scores=scores, normalize=normalize)
    activation = gate_activation(fields)
    shared = MLPConfig(shared_experts * size, activation) if shared_experts else None
    return MoEConfig(router, size, activation, shared=shared, output_scale=share, aux_loss=False)


def _cohere(
    fields: Fields, norm: NormConfig, windows: list[int | None], rotates: list[bool], **more: Any
) -> DecoderConfig:
    """The decoder of both families.

    Args:
        fields: the config.
        norm: config of all norms.
        windows: each layer's sliding window, or None.
        rotates: whether each layer has rotary positions.
        more: further arguments of `compose.decoder`.
    """
    fields.ignore("use_embedding_sharing", "use_parallel_embedding", "layer_switch")  # transformers does not read them
    for name, only in FIXED.items():
        fields.choices(name, only, default=only)
    bias = fields.flag("attention_bias", False)
    own: dict[str, Any] = {"bias": bias, "o_bias": bias, "stored_as_pairs": True}

    def attention(layer: int, common: Any) -> dict[str, Any]:
        return {**own, "window": windows[layer], **({} if rotates[layer] else {"rope": None})}

    return decoder(
        fields,
        norm=norm,
        attention=attention,
        block={"parallel": True},
        head={"logit_scale": fields.number("logit_scale", positive=True)},
        **more,
    )


MOE_NAMES = {"experts.shared": "mlp.shared_experts.{part}_proj"}
FAMILIES = (Family("cohere2", cohere2), Family("cohere2_moe", cohere2_moe, expert_layouts(MOE_NAMES)))
